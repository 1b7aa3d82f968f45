// Sums of rows, each in one order whatever the number of rows.
//
// XLA on CPU sums a row in another order from 8 rows on.

#include "xla/ffi/api/ffi.h"

#include "vec.h"

namespace {

namespace ffi = xla::ffi;
using spec_jax::kWidth;
using spec_jax::Load;
using spec_jax::Vec;

// Argument x [rows, size]; result [rows].
ffi::Error Run(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  const auto shape = x.dimensions();
  if (shape.size() != 2) {
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

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxRowSums, Run,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
