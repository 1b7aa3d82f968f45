// Vectors of 16 floats, and sums whose order never changes.

#pragma once

#include <cstdint>
#include <cstring>

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
