// A whole step of a Llama-shaped decoder in one parallel region, and paged attention by itself; called through ctypes.
//
// 1. Embed: each token's row of the table.
// 2. Per layer: norm; queries, keys and values; head norms, rotation and the write of keys and values; attention;
//    output projection onto the residual; norm; gate and up with SiLU; down projection onto the residual.
// 3. Of the sampled rows: norm, and the head's logits.
//
// Threads share each phase (rows, weight panels, or attention tiles) and meet at its end. OpenMP is whichever runtime the
// process has.

#include <omp.h>

#include "attention.h"

extern "C" {

enum Type { FLOAT, BFLOAT16, INT8 };

struct Shape {
  int64_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab, block_size;
  int64_t window;            // 0: none
  int64_t weights;           // FLOAT, BFLOAT16, INT8
  int64_t embedding;         // FLOAT, BFLOAT16
  float eps, scale;
};

struct Layer {  // null where the model has none
  const float *attention_norm, *qkv_bias, *query_norm, *key_norm, *mlp_norm;
  const void *qkv, *out, *gate_up, *down;  // packed; gate and up alternate panel by panel
  const float *qkv_scale, *out_scale, *gate_up_scale, *down_scale;  // of int8 weights, one for each column
  float* kv;                               // this layer of the cache
};

struct Weights {
  const void* embedding;  // [vocab][hidden], not packed
  const float* norm;
  const void* head;       // packed
  const float* head_scale;
  const float *cos, *sin; // [positions][head_dim / 2]
  const Layer* layers;
};

struct Step {
  int64_t num_tokens, num_samples, num_tiles, table_stride;
  int64_t kv_block_stride, kv_value_offset, kv_head_stride;  // in floats
  const int64_t *token_ids, *position_ids, *slot_mapping, *sample_rows;
  const int32_t* block_tables;
  const int32_t* tiles;  // [num_tiles][3]: sequence, first row, number of rows
  float* work;           // work_size(...) floats
  float* logits;         // [num_samples][vocab]
  double* part_seconds;  // [NUM_PARTS], added to; null: nobody asks
};

enum Part { EMBED, NORM, QKV, PLACE, ATTENTION, OUT, GATE_UP, DOWN, HEAD, NUM_PARTS };

int64_t panel_width() { return PANEL; }

int64_t num_parts() { return NUM_PARTS; }

int64_t work_size(const Shape* shape, int64_t num_tokens) {
  const int64_t heads = shape->num_heads + 2 * shape->num_kv_heads;
  return num_tokens * (2 * shape->hidden + (heads + shape->num_heads) * shape->head_dim + shape->intermediate);
}
}

namespace {

void norm_row(const float* x, const float* weight, int64_t size, float eps, float* out) {
  Vec squares{};
  for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
  const float factor = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
  for (int64_t i = 0; i < size; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
}

void rotate_row(float* x, const float* cos, const float* sin, int64_t dim) {
  const int64_t half = dim / 2;
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const Vec a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

// This thread's share of `count` things, contiguous, in units of `unit`.
struct Share {
  int64_t first, last;
  Share(int64_t count, int64_t unit = 1) {
    const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num(), units = count / unit;
    first = units * me / threads * unit;
    last = units * (me + 1) / threads * unit;
  }
};

template <class W>
struct Decoder {
  const Shape& shape;
  const Weights& weights;
  const Step& step;
  const int64_t hidden = shape.hidden, dim = shape.head_dim, inter = shape.intermediate, tokens = step.num_tokens;
  const int64_t qkv_width = (shape.num_heads + 2 * shape.num_kv_heads) * dim, out_width = shape.num_heads * dim;
  float* const x = step.work;                      // [tokens][hidden], the residual stream
  float* const normed = x + tokens * hidden;       // [tokens][hidden]
  float* const qkv = normed + tokens * hidden;     // [tokens][qkv_width]
  float* const attended = qkv + tokens * qkv_width;    // [tokens][out_width]
  float* const act = attended + tokens * out_width;    // [tokens][inter]
  double began = 0;                                    // of this part

  static const W* packed(const void* p) { return static_cast<const W*>(p); }

  void run(AttentionScratch& scratch) {
    if (step.part_seconds) began = omp_get_wtime();
    for (Share share(tokens); share.first < share.last; ++share.first) {
      const int64_t from = step.token_ids[share.first] * hidden;
      if (shape.embedding == BFLOAT16) embed(static_cast<const Bf16*>(weights.embedding) + from, x + share.first * hidden);
      else embed(static_cast<const float*>(weights.embedding) + from, x + share.first * hidden);
    }
    meet(EMBED);
    for (int64_t l = 0; l < shape.num_layers; ++l) {
      const Layer& layer = weights.layers[l];
      norm(layer.attention_norm);
      meet(NORM);
      project(normed, hidden, layer.qkv, layer.qkv_scale, qkv_width, layer.qkv_bias, qkv, false);
      meet(QKV);
      place(layer);
      meet(PLACE);
      attend(layer, scratch);
      meet(ATTENTION);
      project(attended, out_width, layer.out, layer.out_scale, hidden, nullptr, x, true);
      meet(OUT);
      norm(layer.mlp_norm);
      meet(NORM);
      gate_up(layer);
      meet(GATE_UP);
      project(act, inter, layer.down, layer.down_scale, hidden, nullptr, x, true);
      meet(DOWN);
    }
    for (Share share(step.num_samples); share.first < share.last; ++share.first)
      norm_row(x + step.sample_rows[share.first] * hidden, weights.norm, hidden, shape.eps,
               normed + share.first * hidden);
    meet(NORM);
    const Share panels(shape.vocab / PANEL);
    gemm(normed, hidden, step.num_samples, packed(weights.head), hidden, panels.first, panels.last,
         [&](int64_t row, int64_t rows, int64_t panel, const float* c, int64_t stride) {
           for (int64_t m = 0; m < rows; ++m)
             for (int h = 0; h < PANEL; h += LANES)
               store(step.logits + (row + m) * shape.vocab + panel * PANEL + h,
                     scaled(c + m * stride + h, weights.head_scale, panel * PANEL + h));
         });
    meet(HEAD);
  }

  // The end of a part: all threads wait for the last. The first one keeps the time, waiting included.
  void meet(Part part) {
#pragma omp barrier
    if (!step.part_seconds || omp_get_thread_num() != 0) return;
    const double now = omp_get_wtime();
    step.part_seconds[part] += now - began;
    began = now;
  }

  template <class E>
  void embed(const E* row, float* to) {
    for (int64_t i = 0; i < hidden; ++i) to[i] = widen(row[i]);
  }

  // A piece of a product as it is: int8 weights are in units of their column's scale.
  static Vec scaled(const float* c, const float* scale, int64_t column) {
    return scale ? load(c) * load(scale + column) : load(c);
  }

  void norm(const float* weight) {
    for (Share share(tokens); share.first < share.last; ++share.first)
      norm_row(x + share.first * hidden, weight, hidden, shape.eps, normed + share.first * hidden);
  }

  // to = a * w (+ bias), or to += a * w
  void project(const float* a, int64_t depth, const void* w, const float* scale, int64_t width, const float* bias,
               float* to, bool add) {
    const Share panels(width / PANEL);
    gemm(a, depth, tokens, packed(w), depth, panels.first, panels.last,
         [&](int64_t row, int64_t rows, int64_t panel, const float* c, int64_t stride) {
           for (int64_t m = 0; m < rows; ++m)
             for (int h = 0; h < PANEL; h += LANES) {
               float* at = to + (row + m) * width + panel * PANEL + h;
               Vec value = scaled(c + m * stride + h, scale, panel * PANEL + h);
               if (bias) value += load(bias + panel * PANEL + h);
               store(at, add ? load(at) + value : value);
             }
         });
  }

  // Head norms, rotation, and keys and values into the cache. A thread takes whole tokens.
  void place(const Layer& layer) {
    const int64_t heads = shape.num_heads, kv_heads = shape.num_kv_heads;
    for (Share share(tokens); share.first < share.last; ++share.first) {
      const int64_t t = share.first, slot = step.slot_mapping[t];
      float* row = qkv + t * qkv_width;
      const float* cos = weights.cos + step.position_ids[t] * (dim / 2);
      const float* sin = weights.sin + step.position_ids[t] * (dim / 2);
      for (int64_t h = 0; h < heads + kv_heads; ++h) {
        const float* head_norm = h < heads ? layer.query_norm : layer.key_norm;
        if (head_norm) norm_row(row + h * dim, head_norm, dim, shape.eps, row + h * dim);
        rotate_row(row + h * dim, cos, sin, dim);
      }
      float* block = layer.kv + slot / shape.block_size * step.kv_block_stride + slot % shape.block_size * dim;
      for (int64_t h = 0; h < kv_heads; ++h) {
        std::memcpy(block + h * step.kv_head_stride, row + (heads + h) * dim, dim * 4);
        std::memcpy(block + step.kv_value_offset + h * step.kv_head_stride, row + (heads + kv_heads + h) * dim,
                    dim * 4);
      }
    }
  }

  void attend(const Layer& layer, AttentionScratch& scratch) {
    const AttentionStep how{shape.num_heads, shape.num_kv_heads, dim, shape.block_size, shape.window, shape.scale, 0.0f,
                            step.kv_block_stride, step.kv_value_offset, step.kv_head_stride, step.block_tables,
                            step.table_stride};
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t item = 0; item < step.num_tiles * shape.num_kv_heads; ++item) {
      const int32_t* tile = step.tiles + item / shape.num_kv_heads * 3;
      attend_tile(how, layer.kv, step.block_tables + tile[0] * step.table_stride, item % shape.num_kv_heads,
                  step.position_ids[tile[1]], tile[2], qkv + tile[1] * qkv_width, qkv_width,
                  attended + tile[1] * out_width, out_width, scratch);
    }
  }

  // act = silu(gate) * up; panel 2p holds columns of gate, panel 2p + 1 the same columns of up.
  void gate_up(const Layer& layer) {
    const Share panels(2 * inter / PANEL, 2);
    gemm(normed, hidden, tokens, packed(layer.gate_up), hidden, panels.first, panels.last,
         [&](int64_t row, int64_t rows, int64_t panel, const float* c, int64_t stride) {
           for (int64_t m = 0; m < rows; ++m)
             for (int h = 0; h < PANEL; h += LANES) {
               float* at = act + (row + m) * inter + panel / 2 * PANEL + h;
               const Vec value = scaled(c + m * stride + h, layer.gate_up_scale, panel * PANEL + h);
               store(at, panel % 2 ? load(at) * value : value / (exponential(-value) + 1.0f));
             }
         });
  }
};

}  // namespace

extern "C" {

void decoder_forward(const Shape* shape, const Weights* weights, const Step* step, int num_threads) {
#pragma omp parallel num_threads(num_threads)
  {
    static thread_local AttentionScratch scratch;
    if (shape->weights == INT8) Decoder<int8_t>{*shape, *weights, *step}.run(scratch);
    else if (shape->weights == BFLOAT16) Decoder<Bf16>{*shape, *weights, *step}.run(scratch);
    else Decoder<float>{*shape, *weights, *step}.run(scratch);
  }
}

// `query` and `out` are [num_tokens][num_heads][head_dim] floats; `tiles` and `positions` as in Step.
void paged_attention(const AttentionStep* step, const void* layer, int layer_is_bf16, const float* query, float* out,
                     const int32_t* tiles, int64_t num_tiles, const int64_t* first_positions, int num_threads) {
  const int64_t stride = step->num_heads * step->head_dim;
#pragma omp parallel num_threads(num_threads)
  {
    static thread_local AttentionScratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < num_tiles * step->num_kv_heads; ++item) {
      const int64_t t = item / step->num_kv_heads, kv_head = item % step->num_kv_heads;
      const int32_t* tile = tiles + t * 3;
      const int32_t* table = step->block_tables + tile[0] * step->table_stride;
      const float* from = query + tile[1] * stride;
      float* to = out + tile[1] * stride;
      const auto attend = [&](auto* typed) {
        attend_tile(*step, typed, table, kv_head, first_positions[t], tile[2], from, stride, to, stride, scratch);
      };
      if (layer_is_bf16) attend(static_cast<const Bf16*>(layer));
      else attend(static_cast<const float*>(layer));
    }
  }
}
}
