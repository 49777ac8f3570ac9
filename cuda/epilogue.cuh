// What every product does with its sums: times both scales, plus bias, rounded to the output type.
#pragma once

#include "common.cuh"

namespace qsync {

struct Epilogue {
  const float* a_scale;
  const float* b_scale;
  const void* bias;  // or null
  int a_step, b_step;  // 1 where there is a scale a row, else 0
  int bias_element;
  void* out;
  int64_t rows, columns;
};

__device__ __forceinline__ float bias_at(const Epilogue& e, int64_t column) {
  if (e.bias == nullptr) return 0.0f;
  if (e.bias_element == kFloat32) return static_cast<const float*>(e.bias)[column];
  if (e.bias_element == kBFloat16) return to_float(static_cast<const __nv_bfloat16*>(e.bias)[column]);
  return to_float(static_cast<const __half*>(e.bias)[column]);
}

// Scales and bias of two neighbouring columns, zero past the last.
struct ColumnPair {
  float scale[2], bias[2];

  __device__ __forceinline__ ColumnPair(const Epilogue& e, int64_t column) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool inside = column + i < e.columns;
      scale[i] = inside ? __ldg(e.b_scale + (column + i) * e.b_step) : 0.0f;
      bias[i] = inside ? bias_at(e, column + i) : 0.0f;
    }
  }
  // Compiled without contraction (-fmad=false): rounds as the reference does.
  template <typename Sum> __device__ __forceinline__ float apply(Sum sum, float a_scale, int i) const {
    return static_cast<float>(sum) * a_scale * scale[i] + bias[i];
  }
};

__device__ __forceinline__ float row_scale(const Epilogue& e, int64_t row) {
  return row < e.rows ? __ldg(e.a_scale + row * e.a_step) : 0.0f;
}

// Two values as one 32-bit word of 16-bit elements.
__device__ __forceinline__ uint32_t pack16(float low, float high, bool bfloat) {
  if (bfloat) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void store_one(const Epilogue& e, int element, int64_t row, int64_t column, float value) {
  if (row >= e.rows || column >= e.columns) return;
  const int64_t at = row * e.columns + column;
  if (element == kFloat32) static_cast<float*>(e.out)[at] = value;
  else if (element == kBFloat16) static_cast<__nv_bfloat16*>(e.out)[at] = from_float<__nv_bfloat16>(value);
  else static_cast<__half*>(e.out)[at] = from_float<__half>(value);
}

}  // namespace qsync
