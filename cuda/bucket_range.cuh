// The least and the greatest value of a bucket that threads of a block share; NaN if it holds one.
#pragma once

#include "common.cuh"

namespace qsync {

constexpr int kMostRangeWarps = 8;  // of a block

// The smaller and the larger of two numbers, NaN if one of them is.
__device__ __forceinline__ float least(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a != a || b != b ? NAN : fminf(a, b);
#endif
}

__device__ __forceinline__ float greatest(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a != a || b != b ? NAN : fmaxf(a, b);
#endif
}

// The order of floats as that of unsigned integers, and back; NaN has no place.
__device__ __forceinline__ uint32_t place_of(float v) {
  const uint32_t bits = __float_as_uint(v);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float value_at(uint32_t place) {
  return __uint_as_float(place ^ (place >> 31 ? 0x80000000u : 0xffffffffu));
}

struct Range {
  float low = INFINITY, high = -INFINITY;

  __device__ __forceinline__ void add(float other_low, float other_high) {
    low = least(low, other_low);
    high = greatest(high, other_high);
  }
  __device__ __forceinline__ void add(const float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) add(v[i], v[i]);
  }

  // Over the threads in x of a block; every one gets the result. All threads of the block must call it.
  __device__ __forceinline__ void share(float (*slots)[kMostRangeWarps]) {
    const bool broken = __any_sync(~0u, low != low || high != high);
    low = broken ? NAN : value_at(~warp_max(~place_of(low)));
    high = broken ? NAN : value_at(warp_max(place_of(high)));
    const int warps = blockDim.x / 32;
    if (warps == 1) return;
    const int first = threadIdx.y * warps, lane = threadIdx.x & 31;
    if (lane == 0) {
      slots[0][first + threadIdx.x / 32] = low;
      slots[1][first + threadIdx.x / 32] = high;
    }
    __syncthreads();
    for (int i = 0; i < warps; ++i) add(slots[0][first + i], slots[1][first + i]);
  }
};

}  // namespace qsync
