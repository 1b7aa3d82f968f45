// y = x W (+ bias) for few rows of x, at the speed W comes from memory.
//
// W lies in panels of 16 columns, [panels][K][16], in float32 or bfloat16; the
// last panel is padded with zeros. A tile of rows x panels of sums stays in
// registers while the panels stream by once. More rows than a tile holds are
// several tiles over one chunk of the panels while that is in cache.
//
// Every sum is one chain over k = 0, 1, ..., whatever the number of rows, the
// tile it falls into and the thread that runs it: row r of y has the same bits
// with one row as with 64, and with one thread as with 64.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "xla/ffi/api/ffi.h"

#include "units.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

namespace {

namespace ffi = xla::ffi;

using bf16 = uint16_t;  // the upper half of a float32

constexpr int kPanel = 16;
// Rows whose sums wait in memory while the tiles of one chunk take turns.
constexpr int kMaxRows = 64;

// --- one vector register ----------------------------------------------------
//
// kTile: most rows of one tile; kTiles: of each of several tiles, all of which
// cover the same number of panels; Panels(rows): panels a tile of so many rows
// covers, so that sums, weights and one x fit the registers.

#if defined(__AVX512F__)

constexpr int kWidth = 16, kTile = 12, kTiles = 8;  // 32 registers
constexpr int Panels(int rows) { return rows <= 8 ? 3 : 2; }
using Vec = __m512;
inline Vec Zero() { return _mm512_setzero_ps(); }
inline Vec All(float x) { return _mm512_set1_ps(x); }
inline Vec Load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec Load(const bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline void Store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec Add(Vec sum, Vec a, Vec b) { return _mm512_fmadd_ps(a, b, sum); }

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int kWidth = 8, kTile = 6, kTiles = 6;  // 16 registers
constexpr int Panels(int rows) { return rows <= 2 ? 2 : 1; }
using Vec = __m256;
inline Vec Zero() { return _mm256_setzero_ps(); }
inline Vec All(float x) { return _mm256_set1_ps(x); }
inline Vec Load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec Load(const bf16* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline void Store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec Add(Vec sum, Vec a, Vec b) { return _mm256_fmadd_ps(a, b, sum); }

#elif defined(__aarch64__)

constexpr int kWidth = 4, kTile = 6, kTiles = 6;  // 32 registers
constexpr int Panels(int rows) { return rows <= 2 ? 2 : 1; }
using Vec = float32x4_t;
inline Vec Zero() { return vdupq_n_f32(0); }
inline Vec All(float x) { return vdupq_n_f32(x); }
inline Vec Load(const float* p) { return vld1q_f32(p); }
inline Vec Load(const bf16* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
inline void Store(float* p, Vec v) { vst1q_f32(p, v); }
inline Vec Add(Vec sum, Vec a, Vec b) { return vfmaq_f32(sum, a, b); }

#else  // any other machine: vectors of 4, as compilers know them

constexpr int kWidth = 4, kTile = 2, kTiles = 2;  // 16 registers, or fewer
constexpr int Panels(int) { return 1; }
typedef float Vec __attribute__((vector_size(16)));
inline Vec Zero() { return Vec{0, 0, 0, 0}; }
inline Vec All(float x) { return Vec{x, x, x, x}; }
inline Vec Load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Vec Load(const bf16* p) {
  uint32_t bits[4];
  for (int i = 0; i < 4; ++i) bits[i] = uint32_t{p[i]} << 16;
  Vec v;
  std::memcpy(&v, bits, sizeof v);
  return v;
}
inline void Store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec Add(Vec sum, Vec a, Vec b) { return sum + a * b; }

#endif

// --- one tile ---------------------------------------------------------------

// What a tile reads and where it leaves its sums.
struct Tile {
  const float* x;  // first row, first k
  int64_t x_stride;
  const char* w;  // first panel, first k
  int64_t w_stride;  // bytes between panels
  const char* ahead;  // what to fetch meanwhile: `ahead_step` bytes for each k
  int64_t ahead_step;
  int64_t size;  // number of k
  bool first;  // whether k starts at 0
  float* sums;  // [rows][panels * 16]
};

template <class T, int kRows, int kPanels>
void RunTile(const Tile& t) {
  constexpr int kVecs = kPanels * (kPanel / kWidth);
  constexpr int kPerPanel = kPanel / kWidth;
  Vec sums[kRows][kVecs];
  UNROLL for (int m = 0; m < kRows; ++m) {
    UNROLL for (int v = 0; v < kVecs; ++v) {
      sums[m][v] =
          t.first ? Zero() : Load(t.sums + m * kPanels * kPanel + v * kWidth);
    }
  }
  const float* x = t.x;
  const char* w = t.w;
  const char* ahead = t.ahead;
  for (int64_t k = 0; k < t.size; ++k) {
    Vec row[kVecs];
    UNROLL for (int p = 0; p < kPanels; ++p) {
      const T* from = reinterpret_cast<const T*>(w + p * t.w_stride);
      UNROLL for (int v = 0; v < kPerPanel; ++v) {
        row[p * kPerPanel + v] = Load(from + v * kWidth);
      }
      __builtin_prefetch(ahead + p * t.w_stride, 0, 2);
    }
    UNROLL for (int m = 0; m < kRows; ++m) {
      const Vec value = All(x[m * t.x_stride]);
      UNROLL for (int v = 0; v < kVecs; ++v) {
        sums[m][v] = Add(sums[m][v], value, row[v]);
      }
    }
    ++x;
    w += kPanel * sizeof(T);
    ahead += t.ahead_step;
  }
  UNROLL for (int m = 0; m < kRows; ++m) {
    UNROLL for (int v = 0; v < kVecs; ++v) {
      Store(t.sums + m * kPanels * kPanel + v * kWidth, sums[m][v]);
    }
  }
}

using TileFunction = void (*)(const Tile&);

// Returns the tile of so many rows over one panel or over `Panels(rows)`.
template <class T, int kRows = kTile>
TileFunction FindTile(int rows, bool wide) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return FindTile<T, kRows - 1>(rows, wide);
  }
  return wide ? RunTile<T, kRows, Panels(kRows)> : RunTile<T, kRows, 1>;
}

// --- one call ---------------------------------------------------------------

struct Weight {
  const char* panels;
  const float* bias;  // or null
  float* y;
  int64_t columns;
  int64_t num_panels;
  bool half;  // bfloat16
  int64_t end;  // units of this weight and those before it
};

// One product, or several of the same x. A unit is `group` panels of one
// weight.
struct Job : spec_jax::Units {
  const float* x;
  int64_t rows;
  int64_t size;  // K
  int group;  // panels
  std::vector<Weight> weights;

  void Work();
  void RunUnit(int64_t unit, bool has_next);
  template <class T>
  void RunPanels(const Weight& w, int64_t panel, int count, bool has_next);
};

void Job::Work() {
  spec_jax::FlushDenormals scope;
  int64_t begin, end;
  while (Take(&begin, &end)) {
    for (int64_t unit = begin; unit < end; ++unit) {
      RunUnit(unit, unit + 1 < end);
    }
    Finish(end - begin);
  }
}

void Job::RunUnit(int64_t unit, bool has_next) {
  int64_t begin = 0;
  for (const Weight& w : weights) {
    if (unit < w.end) {
      const int64_t panel = (unit - begin) * group;
      const int64_t count = std::min<int64_t>(group, w.num_panels - panel);
      has_next = has_next && unit + 1 < w.end;
      if (w.half) {
        RunPanels<bf16>(w, panel, static_cast<int>(count), has_next);
      } else {
        RunPanels<float>(w, panel, static_cast<int>(count), has_next);
      }
      return;
    }
    begin = w.end;
  }
}

template <class T>
void Job::RunPanels(const Weight& w, int64_t panel, int count, bool has_next) {
  // A chunk of 3 panels then takes half of a 48 KB first-level cache.
  constexpr int64_t kChunk = 128;
  constexpr int64_t kRow = kPanel * sizeof(T);
  alignas(64) float sums[kMaxRows * Panels(1) * kPanel];
  const int64_t stride = size * kRow;
  if (count < group && count > 1) {  // the odd panels at the end
    for (int i = 0; i < count; ++i) RunPanels<T>(w, panel + i, 1, false);
    return;
  }
  const char* start = w.panels + panel * stride;
  for (int64_t top = 0; top < rows; top += kMaxRows) {
    const int num_rows =
        static_cast<int>(std::min<int64_t>(kMaxRows, rows - top));
    // By all rows: `group` is, and 10 rows left of 74 still go in tiles of 5.
    const int tiles = rows <= kTile ? 1 : (num_rows + kTiles - 1) / kTiles;
    for (int64_t k = 0; k < size; k += kChunk) {
      const int64_t chunk = std::min(kChunk, size - k);
      // The next chunk comes into cache while the tiles take turns over this.
      const char* ahead = start + (k + chunk) * kRow;
      if (k + chunk == size) {
        ahead = top + kMaxRows < rows ? start
                : has_next            ? start + count * stride
                                      : start + k * kRow;
      }
      const int64_t step = kRow / tiles;
      int row = 0;
      for (int i = 0; i < tiles; ++i) {
        const int height = (num_rows - row + tiles - i - 1) / (tiles - i);
        FindTile<T>(height, count > 1)(
            {x + (top + row) * size + k, size, start + k * kRow, stride,
             ahead + i * chunk * step, step, chunk, k == 0,
             sums + row * count * kPanel});
        row += height;
      }
    }
    const int64_t column = panel * kPanel;
    const int64_t width = std::min<int64_t>(count * kPanel, w.columns - column);
    for (int m = 0; m < num_rows; ++m) {
      const float* from = sums + m * count * kPanel;
      float* to = w.y + (top + m) * w.columns + column;
      if (w.bias == nullptr) {
        std::memcpy(to, from, width * sizeof(float));
      } else {
        for (int64_t n = 0; n < width; ++n) {
          to[n] = from[n] + w.bias[column + n];
        }
      }
    }
  }
}

// Arguments x [rows, K], then for each weight panels [P, K, 16] and a bias
// [columns] or [0]; results y [rows, columns] float32. `threads` 0 means as
// many as the process may use.
ffi::Error Run(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
               ffi::RemainingArgs args, ffi::RemainingRets rets,
               int64_t threads) {
  const auto bad = [](const char* what) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, what);
  };
  if (x.dimensions().size() != 2) return bad("x must be [rows, K]");
  if (args.size() != 2 * rets.size()) return bad("one bias for each weight");
  auto job = std::make_shared<Job>();
  job->x = x.typed_data();
  job->rows = x.dimensions()[0];
  job->size = x.dimensions()[1];
  int64_t num_panels = 0;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto panels = args.get<ffi::AnyBuffer>(2 * i);
    auto bias = args.get<ffi::Buffer<ffi::F32>>(2 * i + 1);
    auto y = rets.get<ffi::Buffer<ffi::F32>>(i);
    if (!panels || !bias || !y) return bad("bias and y must be float32");
    const auto shape = panels->dimensions();
    const auto out = (*y)->dimensions();
    if (shape.size() != 3 || shape[1] != job->size || shape[2] != kPanel ||
        out.size() != 2 || out[0] != job->rows ||
        (out[1] + kPanel - 1) / kPanel != shape[0]) {
      return bad("shapes of x, panels and y do not fit");
    }
    const bool half = panels->element_type() == ffi::DataType::BF16;
    if (!half && panels->element_type() != ffi::DataType::F32) {
      return bad("panels must be float32 or bfloat16");
    }
    const int64_t num_bias = bias->element_count();
    if (num_bias != 0 && num_bias != out[1]) return bad("bias does not fit y");
    job->weights.push_back({static_cast<const char*>(panels->untyped_data()),
                            num_bias ? bias->typed_data() : nullptr,
                            (*y)->typed_data(), out[1], shape[0], half, 0});
    num_panels += shape[0];
  }
  job->group = Panels(
      static_cast<int>(job->rows <= kTile ? job->rows : kTiles));
  const int64_t most = threads > 0 ? threads : spec_jax::NumProcessors();
  if (num_panels < most * job->group) job->group = 1;
  for (Weight& w : job->weights) {
    job->num_units += (w.num_panels + job->group - 1) / job->group;
    w.end = job->num_units;
  }
  if (job->rows == 0) return ffi::Error::Success();
  spec_jax::RunUnits(pool, job, threads);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxSkinnyMatmul, Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("threads"));
