// Tensor maps: what the copy engine must know of a tensor in device memory (host side).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "common.cuh"

namespace qsync {

// The driver's functions, found at run time: the library does not link against libcuda.
template <typename Function> Function* driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result) != cudaSuccess) return nullptr;
  return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(found) : nullptr;
}

struct MapElement {
  CUtensorMapDataType type;
  int bytes;
};

inline MapElement map_element(int element) {
  switch (element) {
    case kFloat32:
      return {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4};
    case kBFloat16:
      return {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2};
    case kFloat16:
      return {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2};
    default:
      return {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1};
  }
}

// Row-major [rows, columns]; boxes of `box_rows` rows of 128 bytes, in the 128-byte swizzle.
inline int matrix_map(CUtensorMap* map, const void* data, int element, int64_t rows, int64_t columns, int box_rows) {
  static auto* encode = driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  if (encode == nullptr) return kNoTensorMap;
  const MapElement kind = map_element(element);
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t distances[1] = {static_cast<cuuint64_t>(columns * kind.bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / kind.bytes), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result = encode(map, kind.type, 2, const_cast<void*>(data), sizes, distances, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? kDone : kNoTensorMap;
}

struct Window {  // of a convolution: rows (h) and columns (w)
  int images, channels, height, width, filter_h, filter_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;

  int out_height() const { return (height + 2 * pad_h - dilation_h * (filter_h - 1) - 1) / stride_h + 1; }
  int out_width() const { return (width + 2 * pad_w - dilation_w * (filter_w - 1) - 1) / stride_w + 1; }
  // What an im2col tensor map can hold: corners are signed bytes, shifts bytes, strides 1 to 8.
  bool fits_map() const {
    const int last_h = (filter_h - 1) * dilation_h, last_w = (filter_w - 1) * dilation_w;
    return channels % 16 == 0 && pad_h <= 128 && pad_w <= 128 && last_h - pad_h <= 128 && last_w - pad_w <= 128 &&
           last_h <= 255 && last_w <= 255 && stride_h <= 8 && stride_w <= 8;
  }
};

// NHWC bytes; columns of `pixels` output positions of 128 channels, in the 128-byte swizzle.
inline int pixel_map(CUtensorMap* map, const void* data, const Window& w, int pixels) {
  static auto* encode = driver_function<decltype(cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
  if (encode == nullptr) return kNoTensorMap;
  const cuuint64_t c = w.channels;
  const cuuint64_t sizes[4] = {c, static_cast<cuuint64_t>(w.width), static_cast<cuuint64_t>(w.height),
                               static_cast<cuuint64_t>(w.images)};
  const cuuint64_t distances[3] = {c, c * w.width, c * w.width * w.height};
  const int lower[2] = {-w.pad_w, -w.pad_h};
  const int upper[2] = {w.pad_w - (w.filter_w - 1) * w.dilation_w, w.pad_h - (w.filter_h - 1) * w.dilation_h};
  const cuuint32_t steps[4] = {1, static_cast<cuuint32_t>(w.stride_w), static_cast<cuuint32_t>(w.stride_h), 1};
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, const_cast<void*>(data), sizes, distances,
                                 lower, upper, 128, static_cast<cuuint32_t>(pixels), steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? kDone : kNoTensorMap;
}

}  // namespace qsync
