// The int8 product for any device since Turing (sm_75): 128 x 128 tiles, warp-level matrix instructions.
// Any M, N, K and alignment. On Hopper int8_product_sm90.cu is several times faster.
#include "epilogue.cuh"

using namespace qsync;

namespace {

constexpr int kTileRows = 128, kTileColumns = 128, kTileDepth = 64;
constexpr int kPitch = kTileDepth + 16;  // bytes: fragment reads of 8 rows x 4 words meet 32 different banks
constexpr int kThreads = 256;            // 2 x 4 warps of 64 x 32 outputs
constexpr int kChunks = kTileRows * kTileDepth / 16 / kThreads;  // of 16 bytes a thread moves a step

// 16 x 8 outputs, 32 deep. Turing has 8 x 8 x 16 only: four of them read the same registers.
__device__ __forceinline__ void multiply(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+r"(d[i % 2 * 2]), "+r"(d[i % 2 * 2 + 1])
                 : "r"(a[i]), "r"(b[i / 2]));
#endif
}

__device__ __forceinline__ uint4 load_chunk(const int8_t* matrix, int64_t row, int64_t rows, int64_t column, int64_t k,
                                            bool vectors) {
  uint4 chunk = make_uint4(0, 0, 0, 0);
  if (row >= rows || column >= k) return chunk;
  const int8_t* from = matrix + row * k + column;
  if (vectors) return __ldg(reinterpret_cast<const uint4*>(from));
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (column + i < k) words[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(from[i])) << (i % 4 * 8);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__global__ void __launch_bounds__(kThreads)
    product_kernel(const int8_t* __restrict__ a, const int8_t* __restrict__ b, int64_t k, bool vectors, Epilogue e,
                   int element) {
  __shared__ __align__(16) uint8_t tile_a[2][kTileRows * kPitch];
  __shared__ __align__(16) uint8_t tile_b[2][kTileColumns * kPitch];
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * kTileRows;
  const int64_t column0 = static_cast<int64_t>(blockIdx.y) * kTileColumns;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, place = lane & 3;
  const int warp_row = (warp & 1) * 64, warp_column = (warp >> 1) * 32;
  int sums[4][4][4] = {};
  uint4 next_a[kChunks], next_b[kChunks];

  const auto fetch = [&](int64_t depth) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int index = i * kThreads + threadIdx.x, row = index / 4, at = index % 4 * 16;
      next_a[i] = load_chunk(a, row0 + row, e.rows, depth + at, k, vectors);
      next_b[i] = load_chunk(b, column0 + row, e.columns, depth + at, k, vectors);
    }
  };
  const auto stage = [&](int buffer) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int index = i * kThreads + threadIdx.x, at = index / 4 * kPitch + index % 4 * 16;
      *reinterpret_cast<uint4*>(tile_a[buffer] + at) = next_a[i];
      *reinterpret_cast<uint4*>(tile_b[buffer] + at) = next_b[i];
    }
  };

  fetch(0);
  stage(0);
  __syncthreads();
  int buffer = 0;
  for (int64_t depth = 0; depth < k; depth += kTileDepth, buffer ^= 1) {
    const bool more = depth + kTileDepth < k;
    if (more) fetch(depth + kTileDepth);
#pragma unroll
    for (int step = 0; step < kTileDepth; step += 32) {
      uint32_t fa[4][4], fb[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint8_t* from = tile_a[buffer] + (warp_row + i * 16 + group) * kPitch + step + place * 4;
        fa[i][0] = *reinterpret_cast<const uint32_t*>(from);
        fa[i][1] = *reinterpret_cast<const uint32_t*>(from + 8 * kPitch);
        fa[i][2] = *reinterpret_cast<const uint32_t*>(from + 16);
        fa[i][3] = *reinterpret_cast<const uint32_t*>(from + 8 * kPitch + 16);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint8_t* from = tile_b[buffer] + (warp_column + j * 8 + group) * kPitch + step + place * 4;
        fb[j][0] = *reinterpret_cast<const uint32_t*>(from);
        fb[j][1] = *reinterpret_cast<const uint32_t*>(from + 16);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply(sums[i][j], fa[i], fb[j]);
    }
    if (more) stage(buffer ^ 1);
    __syncthreads();
  }

#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int64_t column = column0 + warp_column + j * 8 + place * 2;
    const ColumnPair pair(e, column);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int64_t row = row0 + warp_row + i * 16 + group + side * 8;
        const float scale = row_scale(e, row);
        store_one(e, element, row, column, pair.apply(sums[i][j][side * 2], scale, 0));
        store_one(e, element, row, column + 1, pair.apply(sums[i][j][side * 2 + 1], scale, 1));
      }
  }
}

}  // namespace

QSYNC_API int qsync_int8_product(const void* a, const void* b, const float* a_scale, const float* b_scale,
                                 const void* bias, int bias_element, void* out, int element, int64_t m, int64_t n,
                                 int64_t k, int a_step, int b_step, cudaStream_t stream) {
  const int64_t tiles_m = ceil_div(m, int64_t{kTileRows}), tiles_n = ceil_div(n, int64_t{kTileColumns});
  if (tiles_m > INT32_MAX || tiles_n > 65535) return kBadArgument;
  const Epilogue e = {a_scale, b_scale, bias, a_step, b_step, bias_element, out, m, n};
  const bool vectors = k % 16 == 0 && aligned(a, 16) && aligned(b, 16);
  product_kernel<<<dim3(static_cast<unsigned>(tiles_m), static_cast<unsigned>(tiles_n)), kThreads, 0, stream>>>(
      static_cast<const int8_t*>(a), static_cast<const int8_t*>(b), k, vectors, e, element);
  return last_error();
}
