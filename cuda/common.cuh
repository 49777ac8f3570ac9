// What every kernel file shares: element types, status codes, exact division, rounding helpers.
//
// Launchers are plain C functions: raw pointers, sizes, and the stream to run on. They return 0,
// a positive cudaError_t, or one of the negative codes below. They never synchronise.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#define QSYNC_API extern "C" __attribute__((visibility("default")))

namespace qsync {

// Keep in step with qsync_opt/kernels/build.py.
enum Status : int { kDone = 0, kBadArgument = -1, kNoSuchKernel = -2, kNoTensorMap = -3 };
enum ElementType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3, kE4M3 = 4, kE5M2 = 5 };

inline int last_error() { return static_cast<int>(cudaGetLastError()); }

inline bool aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

template <typename T>
__host__ __device__ constexpr T ceil_div(T a, T b) { return (a + b - 1) / b; }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }

// |x| as an unsigned integer: its order is that of the magnitudes, with infinity above every finite
// number and NaN above infinity, so an integer maximum propagates both and needs no float atomics.
__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ __forceinline__ uint32_t warp_max(uint32_t v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, v);
#else
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v = max(v, __shfl_xor_sync(~0u, v, d));
  return v;
#endif
}

// Maximum over the threads of a block; `slots` holds 32 words; every thread gets the result.
__device__ __forceinline__ uint32_t block_max(uint32_t v, uint32_t* slots) {
  v = warp_max(v);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = (blockDim.x + 31) >> 5;
  if (warps == 1) return v;
  if (lane == 0) slots[warp] = v;
  __syncthreads();
  v = warp_max(lane < warps ? slots[lane] : 0u);
  return v;
}

}  // namespace qsync
