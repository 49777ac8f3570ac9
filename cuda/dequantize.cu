// The values of a scaled tensor: code * scale in float32, rounded to the wanted type.
#include "codes.cuh"

using namespace qsync;

namespace {

constexpr int kBlock = 256;

template <int kCode> __device__ __forceinline__ float value_of(uint8_t code) {
  if constexpr (kCode == kInt8) return static_cast<float>(static_cast<int8_t>(code));
  const __half_raw half = __nv_cvt_fp8_to_halfraw(code, kCode == kE4M3 ? __NV_E4M3 : __NV_E5M2);
  return __half2float(__half(half));
}

// scale_row, scale_column: 1 where the scale varies along rows or columns, else 0. Eight codes a thread.
template <typename T, int kCode>
__global__ void dequantize_kernel(const uint8_t* __restrict__ q, const float* __restrict__ scale, T* __restrict__ out,
                                  int64_t rows, int64_t columns, int64_t units, bool vectors, int scale_row,
                                  int scale_column) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  const int64_t row = index / units, column = (index - row * units) * 8;
  if (row >= rows) return;
  const int64_t element = row * columns + column;
  const int count = static_cast<int>(min(columns - column, int64_t{8}));
  uint8_t codes[8];
  if (vectors) {
    *reinterpret_cast<uint2*>(codes) = __ldg(reinterpret_cast<const uint2*>(q + element));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) codes[i] = i < count ? q[element + i] : 0;
  }
  const float row_scale = scale_column ? 0.0f : scale[scale_row ? row : 0];
  T values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float s = scale_column ? (i < count ? scale[column + i] : 0.0f) : row_scale;
    values[i] = from_float<T>(value_of<kCode>(codes[i]) * s);
  }
  if (vectors) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i)
      reinterpret_cast<uint4*>(out + element)[i] = reinterpret_cast<const uint4*>(values)[i];
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) out[element + i] = values[i];
  }
}

template <typename T>
int launch(const void* q, int code, const float* scale, void* out, int64_t rows, int64_t columns, int scale_row,
           int scale_column, cudaStream_t stream) {
  if (!scale_row && !scale_column) {  // one long row: no element is left over at the end of each
    columns *= rows;
    rows = 1;
  }
  const int64_t units = ceil_div(columns, int64_t{8}), blocks = ceil_div(rows * units, int64_t{kBlock});
  if (blocks > INT32_MAX) return kBadArgument;
  const bool vectors = columns % 8 == 0 && aligned(q, 8) && aligned(out, 16);
  const uint8_t* from = static_cast<const uint8_t*>(q);
  T* to = static_cast<T*>(out);
  const unsigned grid = static_cast<unsigned>(blocks);
  switch (code) {
    case kInt8:
      dequantize_kernel<T, kInt8><<<grid, kBlock, 0, stream>>>(from, scale, to, rows, columns, units, vectors, scale_row,
                                                               scale_column);
      break;
    case kE4M3:
      dequantize_kernel<T, kE4M3><<<grid, kBlock, 0, stream>>>(from, scale, to, rows, columns, units, vectors, scale_row,
                                                               scale_column);
      break;
    case kE5M2:
      dequantize_kernel<T, kE5M2><<<grid, kBlock, 0, stream>>>(from, scale, to, rows, columns, units, vectors, scale_row,
                                                               scale_column);
      break;
    default:
      return kBadArgument;
  }
  return last_error();
}

}  // namespace

QSYNC_API int qsync_dequantize(const void* q, int code, const float* scale, void* out, int element, int64_t rows,
                               int64_t columns, int scale_row, int scale_column, cudaStream_t stream) {
  switch (element) {
    case kFloat32:
      return launch<float>(q, code, scale, out, rows, columns, scale_row, scale_column, stream);
    case kBFloat16:
      return launch<__nv_bfloat16>(q, code, scale, out, rows, columns, scale_row, scale_column, stream);
    case kFloat16:
      return launch<__half>(q, code, scale, out, rows, columns, scale_row, scale_column, stream);
    default:
      return kBadArgument;
  }
}
