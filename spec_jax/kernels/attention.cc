// Attention of a few new tokens over a cache and a block of nodes.
//
// Reads only the slots a token sees, however large the cache is, and copies
// nothing. Keys are taken in the order of their positions, cached ones first,
// then the block's visible nodes, and every sum is one chain over that order:
// a token's result has the same bits whether the tokens before it lie in the
// cache or are read beside it, and whatever the number of threads.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

#include "vec.h"

namespace {

namespace ffi = xla::ffi;

using spec_jax::Ints;
using spec_jax::kWidth;
using spec_jax::Load;
using spec_jax::Store;
using spec_jax::Sum;
using spec_jax::Vec;

// e^x for x <= 0, to 2 units in the last place; below -87 it is about 1e-38.
// The range is cut to |r| <= ln(2) / 2 and a polynomial of degree 6 is used.
inline Vec Exp(Vec x) {
  const Vec low = Vec{} - 87.0f;
  x = x < low ? low : x;
  const Vec magic = Vec{} + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const Vec n = (x * 1.44269504f + magic) - magic;
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = Vec{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

// Sizes and arrays of one call; B rows, T tokens, N nodes, H query and G
// key/value heads of width E, R slots.
struct Job {
  const float *query, *cache_k, *cache_v, *block_k, *block_v;
  const int32_t *length, *first;
  const bool* visible;
  float* out;
  int64_t B, T, N, H, G, E, R;
  float scale;
  int64_t num_units = 0;
  std::atomic<int64_t> next{0}, done{0};

  void Work() {
    std::vector<float> scores;
    std::vector<const float*> values;
    std::vector<float> sum(E);
    for (;;) {
      const int64_t unit = next.fetch_add(1, std::memory_order_relaxed);
      if (unit >= num_units) return;
      RunUnit(unit / (T * G), unit / G % T, unit % G, scores, values, sum);
      done.fetch_add(1, std::memory_order_release);
    }
  }

  float Dot(const float* a, const float* b) const {
    Vec sum = {};
    int64_t e = 0;
    for (; e + kWidth <= E; e += kWidth) sum += Load(a + e) * Load(b + e);
    float rest = 0;
    for (; e < E; ++e) rest += a[e] * b[e];
    return Sum(sum) + rest;
  }

  // The queries of one token that read one key/value head.
  void RunUnit(int64_t b, int64_t t, int64_t g, std::vector<float>& scores,
               std::vector<const float*>& values, std::vector<float>& sum) {
    const int64_t held = length[b];
    const int64_t start =
        std::max<int64_t>({0, held - R, first[b * T + t]});
    const bool* sees = visible + (b * T + t) * N;
    const float* keys = cache_k + (b * G + g) * R * E;
    const float* old_values = cache_v + (b * G + g) * R * E;
    const int64_t most = std::max<int64_t>(0, held - start) + N;
    scores.resize((most + kWidth - 1) / kWidth * kWidth);
    values.resize(most);
    const int64_t group = H / G;
    for (int64_t h = g * group; h < (g + 1) * group; ++h) {
      const float* q = query + ((b * T + t) * H + h) * E;
      int64_t count = 0;
      for (int64_t p = start; p < held; ++p) {
        scores[count] = Dot(q, keys + p % R * E) * scale;
        values[count++] = old_values + p % R * E;
      }
      for (int64_t n = 0; n < N; ++n) {
        if (!sees[n]) continue;
        const int64_t at = ((b * N + n) * G + g) * E;
        scores[count] = Dot(q, block_k + at) * scale;
        values[count++] = block_v + at;
      }
      float* y = out + ((b * T + t) * H + h) * E;
      if (count == 0) {
        std::fill(y, y + E, 0.0f);
        continue;
      }
      float top = scores[0];
      for (int64_t j = 1; j < count; ++j) top = std::max(top, scores[j]);
      Vec total = {};
      for (int64_t j = 0; j < count; j += kWidth) {
        // Past the end: weight 0. (Exp of a masked score would be 1e-38.)
        for (int64_t i = count; i < j + kWidth; ++i) scores[i] = top - 100;
        Vec w = Exp(Load(scores.data() + j) - top);
        Store(scores.data() + j, w);
        for (int64_t i = count; i < j + kWidth; ++i) scores[i] = 0;
        total += Load(scores.data() + j);
      }
      Weigh(scores.data(), values, count, 1 / Sum(total), sum.data(), y);
    }
  }

  // y = (sum over j of weights[j] values[j]) * factor, in the order of j.
  void Weigh(const float* weights, const std::vector<const float*>& values,
             int64_t count, float factor, float* sum, float* y) const {
    int64_t e = 0;
    for (; e + 4 * kWidth <= E; e += 4 * kWidth) {
      Vec a = {}, b = {}, c = {}, d = {};
      for (int64_t j = 0; j < count; ++j) {
        const float* v = values[j] + e;
        a += weights[j] * Load(v);
        b += weights[j] * Load(v + kWidth);
        c += weights[j] * Load(v + 2 * kWidth);
        d += weights[j] * Load(v + 3 * kWidth);
      }
      Store(y + e, a * factor);
      Store(y + e + kWidth, b * factor);
      Store(y + e + 2 * kWidth, c * factor);
      Store(y + e + 3 * kWidth, d * factor);
    }
    if (e == E) return;
    std::fill(sum + e, sum + E, 0.0f);
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t i = e; i < E; ++i) sum[i] += weights[j] * values[j][i];
    }
    for (int64_t i = e; i < E; ++i) y[i] = sum[i] * factor;
  }
};

// Arguments: query [B, T, H, E]; cache keys and values [B, G, R, E]; the
// block's [B, N, G, E]; visible [B, T, N]; length [B]; first [B, T].
// Result: [B, T, H, E].
ffi::Error Run(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> query,
               ffi::Buffer<ffi::F32> cache_k, ffi::Buffer<ffi::F32> cache_v,
               ffi::Buffer<ffi::F32> block_k, ffi::Buffer<ffi::F32> block_v,
               ffi::Buffer<ffi::PRED> visible, ffi::Buffer<ffi::S32> length,
               ffi::Buffer<ffi::S32> first, ffi::ResultBuffer<ffi::F32> out,
               float scale) {
  const auto q = query.dimensions(), k = cache_k.dimensions(),
             n = block_k.dimensions();
  if (q.size() != 4 || k.size() != 4 || n.size() != 4 || k[0] != q[0] ||
      n[0] != q[0] || n[2] != k[1] || k[3] != q[3] || n[3] != q[3] ||
      k[1] == 0 || q[2] % k[1] != 0 || k[2] == 0) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "shapes of query, cache and block do not fit");
  }
  auto job = std::make_shared<Job>();
  job->query = query.typed_data();
  job->cache_k = cache_k.typed_data();
  job->cache_v = cache_v.typed_data();
  job->block_k = block_k.typed_data();
  job->block_v = block_v.typed_data();
  job->length = length.typed_data();
  job->first = first.typed_data();
  job->visible = visible.typed_data();
  job->out = out->typed_data();
  job->B = q[0], job->T = q[1], job->H = q[2], job->E = q[3];
  job->G = k[1], job->R = k[2], job->N = n[1];
  job->scale = scale;
  job->num_units = job->B * job->T * job->G;
  const int64_t threads =
      std::min<int64_t>(std::max<int64_t>(1, pool.num_threads()),
                        job->num_units);
  for (int64_t i = 1; i < threads; ++i) pool.Schedule([job] { job->Work(); });
  job->Work();
  for (int64_t spins = 0;
       job->done.load(std::memory_order_acquire) < job->num_units; ++spins) {
    if (spins > 4096) std::this_thread::yield();
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxAttention, Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale"));
