// Attention of a few new tokens over a cache and a block of nodes.
//
// Reads only the slots a token sees, however large the cache is, and copies
// nothing. Keys are taken in the order of their positions, cached ones first,
// then the block's visible nodes, and every sum is one chain over that order:
// a token's result has the same bits whether the tokens before it lie in the
// cache or are read beside it, and whatever the number of threads.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "xla/ffi/api/ffi.h"

#include "units.h"
#include "vec.h"

namespace {

namespace ffi = xla::ffi;

using spec_jax::All;
using spec_jax::Ints;
using spec_jax::kWidth;
using spec_jax::Load;
using spec_jax::Max;
using spec_jax::MulAdd;
using spec_jax::Store;
using spec_jax::Sum;
using spec_jax::Vec;

// e^x for x <= 0, to 2 units in the last place; below -87 it is about 1e-38.
// The range is cut to |r| <= ln(2) / 2 and a polynomial of degree 6 is used.
inline Vec Exp(Vec x) {
  const Vec low = All(-87.0f);
  x = x < low ? low : x;
  const Vec magic = All(12582912.0f);  // 1.5 * 2^23: rounds to an integer
  const Vec n = MulAdd(magic, x, All(1.44269504f)) - magic;
  const Vec r = MulAdd(MulAdd(x, n, All(-0.693359375f)), n,
                       All(2.12194440e-4f));
  Vec p = All(1.9875691500e-4f);
  p = MulAdd(All(1.3981999507e-3f), p, r);
  p = MulAdd(All(8.3334519073e-3f), p, r);
  p = MulAdd(All(4.1665795894e-2f), p, r);
  p = MulAdd(All(1.6666665459e-1f), p, r);
  p = MulAdd(All(5.0000001201e-1f), p, r);
  p = MulAdd(r, p * r, r) + 1.0f;
  const Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

// Sizes and arrays of one call; B rows, T tokens, N nodes, H query and G
// key/value heads of width E, R slots. A unit is one token's queries that read
// one key/value head.
struct Job : spec_jax::Units {
  const float *query, *cache_k, *cache_v, *block_k, *block_v;
  const int32_t *length, *first;
  const bool* visible;
  float* out;
  int64_t B, T, N, H, G, E, R;
  float scale;

  void Work() {
    spec_jax::FlushDenormals scope;
    Room room;
    int64_t begin, end;
    while (Take(&begin, &end)) {
      for (int64_t unit = begin; unit < end; ++unit) {
        RunUnit(unit / (T * G), unit / G % T, unit % G, room);
      }
      Finish(end - begin);
    }
  }

  // Memory that the units of one thread use in turn.
  struct Room {
    std::vector<const float*> keys, values;  // keys: [most]
    std::vector<float> scores;  // [heads][most]
    std::vector<float> sums;    // [E]
  };

  void RunUnit(int64_t b, int64_t t, int64_t g, Room& room) {
    const int64_t held = length[b];
    const int64_t start = std::max<int64_t>({0, held - R, first[b * T + t]});
    const bool* sees = visible + (b * T + t) * N;
    const float* old_k = cache_k + (b * G + g) * R * E;
    const float* old_v = cache_v + (b * G + g) * R * E;
    room.keys.clear();
    room.values.clear();
    for (int64_t p = start, slot = start % R; p < held; ++p) {
      room.keys.push_back(old_k + slot * E);
      room.values.push_back(old_v + slot * E);
      if (++slot == R) slot = 0;
    }
    for (int64_t n = 0; n < N; ++n) {
      if (!sees[n]) continue;
      const int64_t at = ((b * N + n) * G + g) * E;
      room.keys.push_back(block_k + at);
      room.values.push_back(block_v + at);
    }
    const int64_t group = H / G;
    const int64_t at = ((b * T + t) * H + g * group) * E;
    const int64_t count = room.values.size();
    if (count == 0) {
      std::fill(out + at, out + at + group * E, 0.0f);
      return;
    }
    const int64_t most = (count + kWidth - 1) / kWidth * kWidth;
    room.scores.resize(group * most);
    room.sums.resize(E);
    room.keys.resize(most, room.keys.back());  // whole vectors of scores
    Score(query + at, group, room.keys, most, room.scores.data());
    float factors[kHeads];
    for (int64_t h = 0; h < group; h += kHeads) {
      const int64_t heads = std::min(kHeads, group - h);
      float* scores = room.scores.data() + h * most;
      for (int64_t i = 0; i < heads; ++i) {
        factors[i] = 1 / Softmax(scores + i * most, count);
      }
      float* y = out + at + h * E;
      switch (heads) {
        case 1: Weigh<1>(scores, most, factors, room, y); break;
        case 2: Weigh<2>(scores, most, factors, room, y); break;
        case 3: Weigh<3>(scores, most, factors, room, y); break;
        default: Weigh<4>(scores, most, factors, room, y);
      }
    }
  }

  // Heads whose sums over values share one reading of them.
  static constexpr int64_t kHeads = 4;

  // scores[h][j] = q[h] keys[j] * scale.
  void Score(const float* q, int64_t heads,
             const std::vector<const float*>& keys, int64_t most,
             float* scores) const {
    for (int64_t j = 0; j < most; j += kWidth) {
      for (int64_t h = 0; h < heads; ++h) {
        float* to = scores + h * most + j;
        Store(to, Dots(q + h * E, keys.data() + j) * scale);
      }
    }
  }

  // The products of q with 16 keys.
  Vec Dots(const float* q, const float* const* keys) const {
    Vec quarters[4];  // quarter i: keys i, i + 4, i + 8, i + 12
    int64_t e = 0;
    for (int i = 0; i < 4; ++i) {
      const float *a = keys[i], *b = keys[i + 4], *c = keys[i + 8],
                  *d = keys[i + 12];
      Vec sums[4] = {};
      for (e = 0; e + kWidth <= E; e += kWidth) {
        const Vec x = Load(q + e);
        sums[0] = MulAdd(sums[0], x, Load(a + e));
        sums[1] = MulAdd(sums[1], x, Load(b + e));
        sums[2] = MulAdd(sums[2], x, Load(c + e));
        sums[3] = MulAdd(sums[3], x, Load(d + e));
      }
      quarters[i] = spec_jax::Sums(sums[0], sums[1], sums[2], sums[3]);
    }
    const Ints lane = spec_jax::Lanes() & 3;
    Vec dots = lane < 2 ? (lane == 0 ? quarters[0] : quarters[1])
                        : (lane == 2 ? quarters[2] : quarters[3]);
    if (e == E) return dots;
    float rest[kWidth] = {};
    for (int i = 0; i < kWidth; ++i) {
      for (int64_t r = e; r < E; ++r) rest[i] += q[r] * keys[i][r];
    }
    return dots + Load(rest);
  }

  // Turns scores into weights, 0 past the end; returns their sum.
  float Softmax(float* scores, int64_t count) const {
    const Ints last = Ints{} + static_cast<int32_t>(count - 1);
    Vec tops = All(scores[0]);
    for (int64_t j = 0; j < count; j += kWidth) {
      // Past the end stands the last score again.
      tops = Max(Load(scores + j), tops);
    }
    float top = tops[0];
    for (int i = 1; i < kWidth; ++i) top = std::max(top, tops[i]);
    Vec total = {};
    for (int64_t j = 0; j < count; j += kWidth) {
      const Ints index = spec_jax::Lanes() + static_cast<int32_t>(j);
      const Vec weights = Exp(Load(scores + j) - top);
      const Vec kept = index <= last ? weights : Vec{};
      Store(scores + j, kept);
      total += kept;
    }
    return Sum(total);
  }

  // y[h] = (sum over j of weights[h][j] values[j]) * factors[h], in the order
  // of j.
  template <int kRows>
  void Weigh(const float* weights, int64_t stride, const float* factors,
             Room& room, float* y) const {
    const std::vector<const float*>& values = room.values;
    const int64_t count = values.size();
    int64_t e = 0;
    for (; e + 2 * kWidth <= E; e += 2 * kWidth) {
      Vec low[kRows] = {}, high[kRows] = {};
      for (int64_t j = 0; j < count; ++j) {
        const Vec v = Load(values[j] + e), w = Load(values[j] + e + kWidth);
        for (int h = 0; h < kRows; ++h) {
          const Vec x = All(weights[h * stride + j]);
          low[h] = MulAdd(low[h], x, v);
          high[h] = MulAdd(high[h], x, w);
        }
      }
      for (int h = 0; h < kRows; ++h) {
        Store(y + h * E + e, low[h] * factors[h]);
        Store(y + h * E + e + kWidth, high[h] * factors[h]);
      }
    }
    if (e == E) return;
    for (int h = 0; h < kRows; ++h) {
      std::vector<float>& sums = room.sums;
      std::fill(sums.begin() + e, sums.end(), 0.0f);
      for (int64_t j = 0; j < count; ++j) {
        const float weight = weights[h * stride + j];
        for (int64_t i = e; i < E; ++i) sums[i] += weight * values[j][i];
      }
      for (int64_t i = e; i < E; ++i) y[h * E + i] = sums[i] * factors[h];
    }
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
  spec_jax::RunUnits(pool, job, 0);
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
