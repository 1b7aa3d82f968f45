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

// Tokens whose queries read cached keys and values together, at most.
constexpr int64_t kTokens = 4;
// Queries whose sums over values wait in registers, at most.
constexpr int kQueries = 6;

// Sizes and arrays of one call; B rows, T tokens, N nodes, H query and G
// key/value heads of width E, R slots. A unit is the queries of a few tokens
// that read one key/value head.
struct Job : spec_jax::Units {
  const float *query, *cache_k, *cache_v, *block_k, *block_v;
  const int32_t *length, *first;
  const bool* visible;
  float* out;
  int64_t B, T, N, H, G, E, R;
  int64_t tiles;  // of tokens
  float scale;

  void Work() {
    spec_jax::FlushDenormals scope;
    Room room;
    int64_t begin, end;
    while (Take(&begin, &end)) {
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t g = unit / tiles % G, b = unit / (tiles * G);
        const int64_t t = unit % tiles * kTokens;
        RunTokens(b, t, std::min(t + kTokens, T), g, room);
      }
      Finish(end - begin);
    }
  }

  // Memory that the units of one thread use in turn. The first keys and values
  // of all tokens of a tile lie in the cache, in the order of positions; each
  // token has late ones too: cached keys that fill no whole vector, then its
  // visible nodes.
  struct Room {
    std::vector<const float*> keys, values;
    std::vector<const float*> late_keys[kTokens], late_values[kTokens];
    std::vector<const float*> queries;
    std::vector<float*> results;
    std::vector<float> scores;   // [queries][most]
    std::vector<float> factors;  // [queries]
  };

  // First position that token t of row b sees.
  int64_t Start(int64_t b, int64_t t) const {
    return std::max<int64_t>({0, length[b] - R, first[b * T + t]});
  }

  // Runs tokens [t, end); those that see the same cached keys go together.
  void RunTokens(int64_t b, int64_t t, int64_t end, int64_t g, Room& room) {
    while (t < end) {
      int64_t next = t + 1;
      while (next < end && Start(b, next) == Start(b, t)) ++next;
      RunTile(b, t, next, g, room);
      t = next;
    }
  }

  void RunTile(int64_t b, int64_t begin, int64_t end, int64_t g, Room& room) {
    const int64_t group = H / G, tokens = end - begin;
    const int64_t num_queries = tokens * group;
    const int64_t most = FindKeys(b, begin, end, g, room);
    const int64_t cached = room.values.size(), whole = room.keys.size();
    room.queries.resize(num_queries);
    room.results.resize(num_queries);
    room.scores.resize(num_queries * most);
    room.factors.resize(num_queries);
    for (int64_t i = 0; i < num_queries; ++i) {
      const int64_t t = begin + i / group, h = g * group + i % group;
      const int64_t at = ((b * T + t) * H + h) * E;
      room.queries[i] = query + at;
      room.results[i] = out + at;
      std::fill(out + at, out + at + E, 0.0f);
    }
    float* const scores = room.scores.data();
    for (int64_t j = 0; j < whole; j += kWidth) {
      for (int64_t i = 0; i < num_queries; ++i) {
        Store(scores + i * most + j,
              Dots(room.queries[i], &room.keys[j]) * scale);
      }
    }
    for (int64_t i = 0; i < num_queries; ++i) {
      const auto& keys = room.late_keys[i / group];
      float* mine = scores + i * most;
      for (size_t j = 0; j < keys.size(); j += kWidth) {
        Store(mine + whole + j, Dots(room.queries[i], &keys[j]) * scale);
      }
      const int64_t count = cached + room.late_values[i / group].size();
      room.factors[i] = count > 0 ? 1 / Softmax(mine, count) : 0;
    }
    Weigh(scores, most, room.values, num_queries, room.results.data());
    for (int64_t t = 0; t < tokens; ++t) {
      Weigh(scores + t * group * most + cached, most, room.late_values[t],
            group, room.results.data() + t * group);
    }
    for (int64_t i = 0; i < num_queries; ++i) {
      for (int64_t e = 0; e < E; ++e) room.results[i][e] *= room.factors[i];
    }
  }

  // Fills the lists of keys and values for tokens that see the same cached
  // ones; returns room for their scores. Lists of keys fill whole vectors.
  int64_t FindKeys(int64_t b, int64_t begin, int64_t end, int64_t g,
                   Room& room) const {
    const float* old_k = cache_k + (b * G + g) * R * E;
    const float* old_v = cache_v + (b * G + g) * R * E;
    const int64_t start = Start(b, begin);
    room.keys.clear();
    room.values.clear();
    for (int64_t p = start, slot = start % R; p < length[b]; ++p) {
      room.keys.push_back(old_k + slot * E);
      room.values.push_back(old_v + slot * E);
      if (++slot == R) slot = 0;
    }
    const int64_t whole = room.keys.size() / kWidth * kWidth;
    size_t most = 0;
    for (int64_t t = begin; t < end; ++t) {
      auto& keys = room.late_keys[t - begin];
      auto& values = room.late_values[t - begin];
      keys.assign(room.keys.begin() + whole, room.keys.end());
      values.clear();
      for (int64_t n = 0; n < N; ++n) {
        if (!visible[(b * T + t) * N + n]) continue;
        const int64_t at = ((b * N + n) * G + g) * E;
        keys.push_back(block_k + at);
        values.push_back(block_v + at);
      }
      while (keys.size() % kWidth != 0) keys.push_back(keys.back());
      most = std::max(most, keys.size());
    }
    room.keys.resize(whole);
    return whole + most;
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
    // Past the end stands the last score again.
    Vec tops = All(scores[0]);
    for (int64_t j = 0; j < count; j += kWidth) {
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

  // results[i] += sum over j of weights[i][j] values[j], in the order of j.
  void Weigh(const float* weights, int64_t stride,
             const std::vector<const float*>& values, int64_t rows,
             float* const* results) const {
    for (int64_t i = 0; i < rows; i += kQueries) {
      const float* w = weights + i * stride;
      float* const* y = results + i;
      switch (std::min<int64_t>(kQueries, rows - i)) {
        case 1: WeighRows<1>(w, stride, values, y); break;
        case 2: WeighRows<2>(w, stride, values, y); break;
        case 3: WeighRows<3>(w, stride, values, y); break;
        case 4: WeighRows<4>(w, stride, values, y); break;
        case 5: WeighRows<5>(w, stride, values, y); break;
        default: WeighRows<kQueries>(w, stride, values, y);
      }
    }
  }

  template <int kRows>
  void WeighRows(const float* weights, int64_t stride,
                 const std::vector<const float*>& values,
                 float* const* y) const {
    int64_t e = 0;
    for (; e + 2 * kWidth <= E; e += 2 * kWidth) {
      WeighPart<kRows, 2>(weights, stride, values, y, e);
    }
    for (; e + kWidth <= E; e += kWidth) {
      WeighPart<kRows, 1>(weights, stride, values, y, e);
    }
    for (; e < E; ++e) {
      for (int i = 0; i < kRows; ++i) {
        float sum = y[i][e];
        for (size_t j = 0; j < values.size(); ++j) {
          sum += weights[i * stride + j] * values[j][e];
        }
        y[i][e] = sum;
      }
    }
  }

  template <int kRows, int kVecs>
  void WeighPart(const float* weights, int64_t stride,
                 const std::vector<const float*>& values, float* const* y,
                 int64_t e) const {
    Vec sums[kRows][kVecs];
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVecs; ++v) sums[i][v] = Load(y[i] + e + v * kWidth);
    }
    for (size_t j = 0; j < values.size(); ++j) {
      Vec value[kVecs];
      for (int v = 0; v < kVecs; ++v) value[v] = Load(values[j] + e + v * kWidth);
      for (int i = 0; i < kRows; ++i) {
        const Vec weight = All(weights[i * stride + j]);
        for (int v = 0; v < kVecs; ++v) {
          sums[i][v] = MulAdd(sums[i][v], weight, value[v]);
        }
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVecs; ++v) Store(y[i] + e + v * kWidth, sums[i][v]);
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
             n = block_k.dimensions(), see = visible.dimensions(),
             from = first.dimensions();
  if (q.size() != 4 || k.size() != 4 || n.size() != 4 || k[0] != q[0] ||
      n[0] != q[0] || n[2] != k[1] || k[3] != q[3] || n[3] != q[3] ||
      k[1] == 0 || q[2] % k[1] != 0 || k[2] == 0 || see.size() != 3 ||
      see[0] != q[0] || see[1] != q[1] || see[2] != n[1] || from.size() != 2 ||
      from[0] != q[0] || from[1] != q[1] ||
      length.element_count() != static_cast<size_t>(q[0]) ||
      cache_v.element_count() != cache_k.element_count() ||
      block_v.element_count() != block_k.element_count() ||
      out->element_count() != query.element_count()) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "shapes of query, cache, block and masks do not fit");
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
  job->tiles = (job->T + kTokens - 1) / kTokens;
  job->num_units = job->B * job->G * job->tiles;
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
