// Sums of rows, each in one order whatever the number of rows (XLA on CPU sums
// a row in another order from 8 rows on), and rotations of rows (XLA computes
// sine and cosine again in each layer, for each head).

#include "xla/ffi/api/ffi.h"

#include "vec.h"

namespace {

namespace ffi = xla::ffi;
using spec_jax::kWidth;
using spec_jax::Load;
using spec_jax::Store;
using spec_jax::Vec;

// Argument x [rows, size]; result [rows].
ffi::Error RowSums(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  const auto shape = x.dimensions();
  if (shape.size() != 2 ||
      y->element_count() != static_cast<size_t>(shape[0])) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "x must be [rows, n]");
  }
  const int64_t size = shape[1];
  for (int64_t row = 0; row < shape[0]; ++row) {
    const float* from = x.typed_data() + row * size;
    Vec sum = {};
    int64_t i = 0;
    for (; i + kWidth <= size; i += kWidth) sum += Load(from + i);
    float rest = 0;
    for (; i < size; ++i) rest += from[i];
    y->typed_data()[row] = spec_jax::Sum(sum) + rest;
  }
  return ffi::Error::Success();
}

// Arguments x [rows, heads, 2 half], cosine and sine [rows, half]; result like
// x: pairs (i, i + half) turned.
ffi::Error Rotate(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> cosine,
                  ffi::Buffer<ffi::F32> sine, ffi::ResultBuffer<ffi::F32> y) {
  const auto shape = x.dimensions();
  const auto angles = cosine.dimensions();
  if (shape.size() != 3 || angles.size() != 2 || shape[0] != angles[0] ||
      shape[2] != 2 * angles[1] ||
      cosine.element_count() != sine.element_count() ||
      x.element_count() != y->element_count()) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "shapes of x and the angles do not fit");
  }
  const int64_t heads = shape[1], half = angles[1];
  for (int64_t row = 0; row < shape[0]; ++row) {
    const float* c = cosine.typed_data() + row * half;
    const float* s = sine.typed_data() + row * half;
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t at = (row * heads + head) * 2 * half;
      const float *a = x.typed_data() + at, *b = a + half;
      float *to = y->typed_data() + at, *too = to + half;
      int64_t i = 0;
      for (; i + kWidth <= half; i += kWidth) {
        const Vec p = Load(a + i), q = Load(b + i);
        const Vec u = Load(c + i), v = Load(s + i);
        Store(to + i, p * u - q * v);
        Store(too + i, q * u + p * v);
      }
      for (; i < half; ++i) {
        const float p = a[i], q = b[i];
        to[i] = p * c[i] - q * s[i];
        too[i] = q * c[i] + p * s[i];
      }
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxRowSums, RowSums,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxRotate, Rotate,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
