// Vectors of the widest width the compiler was told of, and the few functions on them that the kernels need.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int PANEL = 16;  // columns that one micro-kernel computes side by side, the same on every machine
constexpr int VECTORS = PANEL / LANES;

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef float VecAt __attribute__((vector_size(LANES * 4), aligned(4), may_alias));  // anywhere in memory
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalvesAt __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int8_t BytesAt __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint16_t Bf16;

inline Vec load(const float* at) { return *reinterpret_cast<const VecAt*>(at); }

inline Vec load(const Bf16* at) {  // a bfloat16 is the upper half of a float
#if defined(__AVX512F__)
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16);
#elif defined(__AVX2__)
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at)), 16);
#else
  return (Vec)(__builtin_convertvector(*reinterpret_cast<const HalvesAt*>(at), Words) << 16);
#endif
}

inline Vec load(const int8_t* at) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
#else
  return __builtin_convertvector(*reinterpret_cast<const BytesAt*>(at), Vec);
#endif
}

#if defined(__AVX2__)
inline __m256 load8(const float* at) { return _mm256_loadu_ps(at); }

inline __m256 load8(const Bf16* at) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at)), 16));
}
#endif

inline void store(float* at, Vec value) { *reinterpret_cast<VecAt*>(at) = value; }

inline Vec splat(float value) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(value);
#elif defined(__AVX2__)
  return _mm256_set1_ps(value);
#else
  return Vec{value, value, value, value, value, value, value, value};
#endif
}

inline float widen(float value) { return value; }

inline float widen(Bf16 value) {
  const uint32_t bits = uint32_t(value) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline float sum(Vec v) {
  float total = 0;
  for (int i = 0; i < LANES; ++i) total += v[i];
  return total;
}

inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

inline float maximum(Vec v) {
  float best = v[0];
  for (int i = 1; i < LANES; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

// e^x by Cody-Waite reduction and the polynomial of Cephes' expf (2 ulp); 0 below -87, infinity-safe above 88.
inline Vec exponential(Vec x) {
  const Vec clamped = x > 88.0f ? splat(88.0f) : (x < -87.0f ? splat(-87.0f) : x);
  const Vec shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = (clamped * 1.44269504088896341f + shifter) - shifter;
  const Vec r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Vec power = (Vec)((__builtin_convertvector(n, Ints) + 127) << 23);
  return x < -87.0f ? Vec{} : p * power;
}
