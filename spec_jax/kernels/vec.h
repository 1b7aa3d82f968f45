// Vectors of 16 floats, and sums whose order never changes.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace spec_jax {

constexpr int kWidth = 16;
typedef float Vec __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));

inline Vec Load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void Store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Vec All(float x) {
  return Vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

inline Vec Max(Vec a, Vec b) { return a > b ? a : b; }

// 0, 1, ... 15.
inline Ints Lanes() {
  return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

// sum + a * b, rounded once where the machine can, the same in every lane.
inline Vec MulAdd(Vec sum, Vec a, Vec b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b),
                      reinterpret_cast<__m512>(sum)));
#elif defined(__AVX2__) && defined(__FMA__)
  __m256 x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  std::memcpy(z, &sum, sizeof sum);
  for (int i = 0; i < 2; ++i) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
  std::memcpy(&sum, z, sizeof sum);
  return sum;
#elif defined(__aarch64__)
  float32x4_t x[4], y[4], z[4];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  std::memcpy(z, &sum, sizeof sum);
  for (int i = 0; i < 4; ++i) z[i] = vfmaq_f32(z[i], x[i], y[i]);
  std::memcpy(&sum, z, sizeof sum);
  return sum;
#else
  return sum + a * b;
#endif
}

// Lanes of two vectors by index, 0 to 15 the first's, 16 to 31 the second's.
#if defined(__clang__)
#define SPEC_JAX_LANES(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SPEC_JAX_LANES(a, b, ...) __builtin_shuffle(a, b, (Ints{__VA_ARGS__}))
#endif

// Lanes 0 to 7 are a[i] + a[i + 8], lanes 8 to 15 b[i] + b[i + 8].
inline Vec AddHalves(Vec a, Vec b) {
  return SPEC_JAX_LANES(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21,
                        22, 23) +
         SPEC_JAX_LANES(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28,
                        29, 30, 31);
}

// The sums of the lanes of four vectors, each in the order of `Sum` and four
// times over: lanes 0 to 3 are all the first's.
inline Vec Sums(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = AddHalves(a, b), cd = AddHalves(c, d);
  Vec all = SPEC_JAX_LANES(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19,
                           24, 25, 26, 27) +
            SPEC_JAX_LANES(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23,
                           28, 29, 30, 31);
  all += SPEC_JAX_LANES(all, all, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15,
                        12, 13);
  return all + SPEC_JAX_LANES(all, all, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10,
                              13, 12, 15, 14);
}

// The sum of the lanes, by halves.
inline float Sum(Vec v) {
  float x[kWidth];
  std::memcpy(x, &v, sizeof v);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  }
  return x[0];
}

}  // namespace spec_jax
