// Causal attention over a paged cache, one tile of query rows and one KV head at a time.
//
// A tile is some consecutive tokens of one sequence times the query heads that share a KV head. The context is walked in
// chunks that begin at multiples of CHUNK, with an online softmax (Milakov and Gimelshein, arXiv 1805.02867), so that a
// row's result does not depend on which tile or batch it is computed in. Slots past the end of a sequence are never read.
#pragma once

#include <cmath>
#include <vector>

#include "gemm.h"

constexpr int CHUNK = 64;      // context positions per round of softmax
constexpr int TILE_QUERY = 48; // most query rows of a tile

struct AttentionStep {
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  int64_t window;                                   // 0: all of the context
  float scale, softcap;                             // softcap 0: off
  int64_t block_stride, value_offset, head_stride;  // of the cache's layer, in elements; slots are head_dim apart
  const int32_t* block_tables;
  int64_t table_stride;
};

struct AttentionScratch {
  std::vector<float> query, out, keys, scores, peak, weight;
};

// keys[d][position] = k[position][d] for `count` positions of one block, `at` being the first one's column.
template <class KV>
inline void transpose_keys(const KV* k, int64_t count, int64_t head_dim, float* keys, int64_t at) {
  int64_t s = 0;
#if defined(__AVX2__)
  for (; s + 8 <= count; s += 8)
    for (int64_t d = 0; d < head_dim; d += 8) {
      __m256 r[8], t[8];
      for (int i = 0; i < 8; ++i) r[i] = load8(k + (s + i) * head_dim + d);
      for (int i = 0; i < 4; ++i) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
      }
      for (int i = 0; i < 2; ++i) {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xEE);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xEE);
      }
      for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(keys + (d + i) * CHUNK + at + s, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(keys + (d + i + 4) * CHUNK + at + s, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
      }
    }
#endif
  for (; s < count; ++s)
    for (int64_t d = 0; d < head_dim; ++d) keys[d * CHUNK + at + s] = widen(k[s * head_dim + d]);
}

// Turns a row's scores of one chunk into weights, and returns by how much what was summed before has to shrink.
inline float soften(float* scores, int64_t seen_from, int64_t seen_to, float softcap, float& peak, float& weight) {
  if (softcap > 0)
    for (int64_t j = seen_from; j < seen_to; ++j) scores[j] = softcap * std::tanh(scores[j] / softcap);
  for (int64_t j = 0; j < seen_from; ++j) scores[j] = -INFINITY;
  for (int64_t j = seen_to; j < CHUNK; ++j) scores[j] = -INFINITY;
  Vec best = load(scores);
  for (int j = LANES; j < CHUNK; j += LANES) best = maximum(best, load(scores + j));
  const float new_peak = std::max(peak, maximum(best));
  const float shift = new_peak == -INFINITY ? 0.0f : new_peak;
  Vec total{};
  for (int j = 0; j < CHUNK; j += LANES) {
    const Vec p = exponential(load(scores + j) - shift);
    store(scores + j, p);
    total += p;
  }
  const float decay = peak == -INFINITY ? 0.0f : exponential(splat(peak - shift))[0];
  weight = weight * decay + sum(total);
  peak = new_peak;
  return decay;
}

// Query rows of `num_tokens` tokens from position `first` on, of the heads that share `kv_head`. `query` and `out` point at
// the first token's first head.
template <class KV>
void attend_tile(const AttentionStep& step, const KV* layer, const int32_t* table, int64_t kv_head, int64_t first,
                 int64_t num_tokens, const float* query, int64_t query_stride, float* out, int64_t out_stride,
                 AttentionScratch& scratch) {
  const int64_t dim = step.head_dim, group = step.num_heads / step.num_kv_heads, rows = num_tokens * group;
  scratch.query.resize(rows * dim);
  scratch.out.assign(rows * dim, 0.0f);
  scratch.keys.resize(dim * CHUNK);
  scratch.scores.resize(rows * CHUNK);
  scratch.peak.assign(rows, -INFINITY);
  scratch.weight.assign(rows, 0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = query + (r / group) * query_stride + (kv_head * group + r % group) * dim;
    for (int64_t d = 0; d < dim; ++d) scratch.query[r * dim + d] = from[d] * step.scale;
  }
  const int64_t end = first + num_tokens;  // of the context that the tile's last token sees
  const int64_t begin = step.window ? std::max<int64_t>(0, first - step.window + 1) / CHUNK * CHUNK : 0;
  float* scores = scratch.scores.data();
  const auto block_of = [&](int64_t position) {
    return layer + table[position / step.block_size] * step.block_stride + kv_head * step.head_stride;
  };
  for (int64_t at = begin; at < end; at += CHUNK) {
    const int64_t count = std::min<int64_t>(CHUNK, end - at);
    for (int64_t j = 0; j < count;) {  // block by block
      const int64_t slot = (at + j) % step.block_size, run = std::min(step.block_size - slot, count - j);
      const KV* k = block_of(at + j) + slot * dim;
      const KV* next = at + j + run < end ? block_of(at + j + run) : k;
      // blocks lie apart, and the hardware does not see them coming
      for (int64_t i = 0; i < run * dim; i += 64 / int64_t(sizeof(KV))) {
        __builtin_prefetch(k + step.value_offset + i, 0, 2);
        __builtin_prefetch(next + i, 0, 2);
      }
      transpose_keys(k, run, dim, scratch.keys.data(), j);
      j += run;
    }
    const int64_t columns = (count + PANEL - 1) / PANEL * PANEL;  // the rest of `keys` is stale but finite, and not seen
    each_tile(rows, [&](int64_t r, int tile) {
      for (int64_t n = 0; n < columns; n += PANEL)
        micro_rows(tile, scratch.query.data() + r * dim, dim, scratch.keys.data() + n, CHUNK, dim,
                          scores + r * CHUNK + n, CHUNK, false);
    });
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = first + r / group;
      const int64_t seen_to = std::clamp<int64_t>(position + 1 - at, 0, CHUNK);
      const int64_t seen_from = step.window ? std::clamp<int64_t>(position + 1 - step.window - at, 0, seen_to) : 0;
      float *row = scores + r * CHUNK, *sums = &scratch.out[r * dim];
      const float decay = soften(row, seen_from, seen_to, step.softcap, scratch.peak[r], scratch.weight[r]);
      if (decay != 1.0f)
        for (int64_t d = 0; d < dim; d += LANES) store(sums + d, load(sums + d) * decay);
    }
    for (int64_t j = 0; j < count;) {
      const int64_t slot = (at + j) % step.block_size, run = std::min(step.block_size - slot, count - j);
      const KV* v = block_of(at + j) + step.value_offset + slot * dim;
      each_tile(rows, [&](int64_t r, int tile) {
        for (int64_t d = 0; d < dim; d += PANEL)
          micro_rows(tile, scores + r * CHUNK + j, CHUNK, v + d, dim, run, &scratch.out[r * dim + d], dim, true);
      });
      j += run;
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* to = out + (r / group) * out_stride + (kv_head * group + r % group) * dim;
    for (int64_t d = 0; d < dim; ++d) to[d] = scratch.out[r * dim + d] / scratch.weight[r];
  }
}
