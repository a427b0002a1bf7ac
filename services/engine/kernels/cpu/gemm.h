// Products of float rows with packed weights: c[m][n] = sum over k of a[m][k] * w[n][k].
//
// Weights lie in panels of PANEL output columns: w[panel][k][PANEL], in float, bfloat16 or int8; arithmetic is float.
// Every element of c is one chain of fused multiply-adds in the order of k, whatever the number of rows and however they
// are tiled: so a row's result does not depend on its neighbours, to the last bit.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

constexpr int TILE_ROWS = 12 / VECTORS;  // 12 accumulators: AVX2 has 16 registers
constexpr int FEW_ROWS = 6 * TILE_ROWS;  // up to here weights are widened as they are used, beyond once for many rows
constexpr int BLOCK_ROWS = 96;           // rows of a that stay in the second-level cache
constexpr int BLOCK_DEPTH = 512;         // a widened panel of this depth stays in the nearest caches

// c[m][p * PANEL ...] (+)= a[m][0..depth) * b for ROWS rows and PANELS panels. Rows of b are `b_stride` apart, its panels
// `panel_stride`, and with FETCH what lies `ahead` of them is fetched meanwhile (a constant: asked inside the loop, it
// costs a fifth of the rate at many rows). Not inlined: in a caller the compiler runs out of registers.
template <int ROWS, int PANELS, bool FETCH, class W>
__attribute__((noinline)) void micro(const float* a, int64_t a_stride, const W* b, int64_t b_stride, int64_t panel_stride,
                                     int64_t depth, float* c, int64_t c_stride, bool accumulate, int64_t ahead) {
  Vec acc[ROWS][PANELS][VECTORS];
  for (int m = 0; m < ROWS; ++m)
    for (int p = 0; p < PANELS; ++p)
      for (int h = 0; h < VECTORS; ++h)
        acc[m][p][h] = accumulate ? load(c + m * c_stride + p * PANEL + h * LANES) : Vec{};
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    Vec w[PANELS][VECTORS];
    for (int p = 0; p < PANELS; ++p)
      for (int h = 0; h < VECTORS; ++h) w[p][h] = load(b + p * panel_stride + k * b_stride + h * LANES);
    for (int m = 0; m < ROWS; ++m) {
      const Vec x = splat(a[m * a_stride + k]);
      for (int p = 0; p < PANELS; ++p)
        for (int h = 0; h < VECTORS; ++h) acc[m][p][h] += x * w[p][h];
    }
  };
  constexpr int LINE = std::max<int>(1, 64 / (PANEL * sizeof(W)));  // rows of b in a cache line
  int64_t k = 0;
  for (; k + LINE <= depth; k += LINE) {
    if (FETCH) __builtin_prefetch(b + ahead + k * b_stride, 0, 2);
    for (int j = 0; j < LINE; ++j) step(k + j);
  }
  for (; k < depth; ++k) step(k);
  for (int m = 0; m < ROWS; ++m)
    for (int p = 0; p < PANELS; ++p)
      for (int h = 0; h < VECTORS; ++h) store(c + m * c_stride + p * PANEL + h * LANES, acc[m][p][h]);
}

// The same for one panel and 1 to TILE_ROWS rows known at run time.
template <bool FETCH = false, int ROWS = TILE_ROWS, class W>
inline void micro_rows(int rows, const float* a, int64_t a_stride, const W* b, int64_t b_stride, int64_t depth, float* c,
                       int64_t c_stride, bool accumulate, int64_t ahead = 0) {
  if (rows == ROWS) micro<ROWS, 1, FETCH>(a, a_stride, b, b_stride, 0, depth, c, c_stride, accumulate, ahead);
  else if constexpr (ROWS > 1)
    micro_rows<FETCH, ROWS - 1>(rows, a, a_stride, b, b_stride, depth, c, c_stride, accumulate, ahead);
}

// Calls `f(first, count)` for tiles of at most TILE_ROWS rows, as even as they can be: a short last tile would starve the
// FMA units.
template <class F>
inline void each_tile(int64_t rows, F f) {
  const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  for (int64_t t = 0; t < tiles; ++t) f(rows * t / tiles, int(rows * (t + 1) / tiles - rows * t / tiles));
}

// A few rows against panels [first, last): weights are widened as they are used.
template <class W, class Finish>
void gemm_few(const float* a, int64_t a_stride, int64_t rows, const W* weights, int64_t depth, int64_t first, int64_t last,
              Finish finish) {
  const int64_t panel_size = depth * PANEL;
  alignas(64) float c[FEW_ROWS * PANEL];
  int64_t panel = first;
  // several panels at once where rows are few: enough accumulators to hide the latency of an FMA
  const auto grouped = [&](auto rows_constant, auto panels_constant) {
    constexpr int ROWS = decltype(rows_constant)::value, PANELS = decltype(panels_constant)::value;
    for (; panel + PANELS <= last; panel += PANELS) {
      micro<ROWS, PANELS, true>(a, a_stride, weights + panel * panel_size, PANEL, panel_size, depth, c, PANELS * PANEL,
                                false, PANELS * panel_size);
      for (int p = 0; p < PANELS; ++p) finish(0, rows, panel + p, c + p * PANEL, PANELS * PANEL);
    }
  };
  if (rows == 1) grouped(std::integral_constant<int, 1>(), std::integral_constant<int, 8 / VECTORS>());
  if (rows == 2) grouped(std::integral_constant<int, 2>(), std::integral_constant<int, 4 / VECTORS>());
  for (; panel < last; ++panel) {
    const W* b = weights + panel * panel_size;
    each_tile(rows, [&](int64_t m, int count) {
      const float* from = a + m * a_stride;
      if (m == 0) micro_rows<true>(count, from, a_stride, b, PANEL, depth, c, PANEL, false, panel_size);
      else micro_rows(count, from, a_stride, b, PANEL, depth, c + m * PANEL, PANEL, false);
    });
    finish(0, rows, panel, c, PANEL);
  }
}

// Many rows: a slice of a panel is widened once for a block of rows.
template <class W, class Finish>
void gemm_many(const float* a, int64_t a_stride, int64_t rows, const W* weights, int64_t depth, int64_t first, int64_t last,
               Finish finish) {
  alignas(64) float c[BLOCK_ROWS * PANEL];
  alignas(64) float wide[BLOCK_DEPTH * PANEL];
  const int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t row = rows * block / blocks, count = rows * (block + 1) / blocks - row;
    for (int64_t panel = first; panel < last; ++panel) {
      for (int64_t k = 0; k < depth; k += BLOCK_DEPTH) {
        const int64_t slice = std::min<int64_t>(BLOCK_DEPTH, depth - k);
        const W* b = weights + (panel * depth + k) * PANEL;
        for (int64_t i = 0; i < slice * PANEL; i += LANES) store(wide + i, load(b + i));
        for (int64_t i = 0; i < slice * PANEL; i += 64 / int64_t(sizeof(W)))
          __builtin_prefetch(b + slice * PANEL + i, 0, 2);  // the next slice
        each_tile(count, [&](int64_t m, int tile) {
          micro_rows(tile, a + (row + m) * a_stride + k, a_stride, wide, PANEL, slice, c + m * PANEL, PANEL, k > 0);
        });
      }
      finish(row, count, panel, c, PANEL);
    }
  }
}

// All rows against panels [first, last). Each finished piece of PANEL columns goes to
// `finish(row, num_rows, panel, c, c_stride)`.
template <class W, class Finish>
void gemm(const float* a, int64_t a_stride, int64_t rows, const W* weights, int64_t depth, int64_t first, int64_t last,
          Finish finish) {
  if (rows <= FEW_ROWS) gemm_few(a, a_stride, rows, weights, depth, first, last, finish);
  else gemm_many(a, a_stride, rows, weights, depth, first, last, finish);
}
