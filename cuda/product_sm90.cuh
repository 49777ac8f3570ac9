// The Hopper product: out = (a @ b^T) * a_scale * b_scale^T + bias for 8-bit a [M, K] and b [N, K].
//
// One block a multiprocessor walks over tiles of 128 x kColumns outputs. A producer warp keeps a ring of
// stages filled through the copy engine; two consumer warpgroups multiply 64 rows each and hold their
// sums in registers. Blocks of a cluster of two work on neighbouring row tiles and share each tile of b by
// multicast, which halves its traffic from the L2 cache. Because a warpgroup starts its next tile as soon as
// its own results are staged, one stores while the other still multiplies.
// For a convolution (kPixels) the producer reads a through an im2col map instead: rows of a are output
// positions, and a step of K is 128 channels of one filter tap.
#pragma once

#include "epilogue.cuh"
#include "hopper.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

namespace qsync {

constexpr int kRows = 128;        // of a tile
constexpr int kDepth = 128;       // bytes of K a stage holds: one row of the swizzle
constexpr int kThreads = 384;     // a producer warpgroup and two consumers
constexpr int kStageBytesA = kRows * kDepth;
constexpr int kStagingBytes = 64 * 128;  // 64 rows of 128 bytes, two a consumer
constexpr int kRingBytes = 192 * 1024;

template <int kColumns> constexpr int kStagesOf = kRingBytes / (kStageBytesA + kColumns * kDepth);
constexpr int kSharedBytes = kRingBytes + 4 * kStagingBytes + 1024 + 256;

struct ProductShape {
  Epilogue epilogue;
  int element;       // of the output
  int direct;        // the output's rows are not 16-byte aligned: store from registers
  int k_steps;
  int tiles_m;       // in clusters
  int tiles_n;
  int group;         // row tiles that are walked together, so that a and b stay in the L2 cache
  // Convolution only.
  int channel_steps, channels, filter_w, dilation_h, dilation_w, out_height, out_width;
  int stride_h, stride_w, pad_h, pad_w;
};

struct Tile {
  int m, n;  // row tile of the cluster, column tile

  __device__ __forceinline__ Tile(const ProductShape& p, int index) {
    const int in_group = p.group * p.tiles_n, first = index / in_group * p.group;
    const int height = min(p.tiles_m - first, p.group), rest = index % in_group;
    m = first + rest % height;
    n = rest / height;
  }
};

template <typename Elements, int kColumns, int kCluster, bool kPixels>
__device__ __forceinline__ void produce(const CUtensorMap& a_map, const CUtensorMap& b_map, const ProductShape& p,
                                        uint8_t* a_ring, uint8_t* b_ring, uint64_t* full, uint64_t* empty) {
  using namespace hopper;
  constexpr int kStages = kStagesOf<kColumns>, kShare = kColumns / kCluster;
  const uint32_t rank = kCluster > 1 ? cluster_rank() : 0;
  const int clusters = gridDim.x / kCluster;
  int stage = 0;
  uint32_t phase = 0;
  for (int index = blockIdx.x / kCluster; index < p.tiles_m * p.tiles_n; index += clusters) {
    const Tile tile(p, index);
    const int row = (tile.m * kCluster + rank) * kRows, column = tile.n * kColumns;
    int image = 0, h = 0, w = 0;
    if constexpr (kPixels) {
      w = row % p.out_width * p.stride_w - p.pad_w;
      h = row / p.out_width % p.out_height * p.stride_h - p.pad_h;
      image = row / p.out_width / p.out_height;
    }
    int channel_step = 0, tap_h = 0, tap_w = 0;
    for (int k = 0; k < p.k_steps; ++k) {
      barrier_wait(empty + stage, phase ^ 1);
      barrier_expect(full + stage, kStageBytesA + kColumns * kDepth);
      uint8_t* a = a_ring + stage * kStageBytesA;
      uint8_t* b = b_ring + stage * kColumns * kDepth + rank * kShare * kDepth;
      int b_column = k * kDepth;
      if constexpr (kPixels) {
        load_pixels(a, &a_map, full + stage, channel_step * kDepth, w, h, image, tap_w * p.dilation_w,
                    tap_h * p.dilation_h);
        b_column = (tap_h * p.filter_w + tap_w) * p.channels + channel_step * kDepth;
        if (++channel_step == p.channel_steps) {
          channel_step = 0;
          if (++tap_w == p.filter_w) tap_w = 0, ++tap_h;
        }
      } else {
        load_tile(a, &a_map, full + stage, b_column, row);
      }
      if constexpr (kCluster > 1)
        load_tile_multicast(b, &b_map, full + stage, b_column, column + rank * kShare, (1 << kCluster) - 1);
      else
        load_tile(b, &b_map, full + stage, b_column, column);
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
  }
}

// Scales and bias of a tile's columns, spread over the lanes of a warp so that they cost four registers for
// each 64 columns and no shared memory: lane 4g + c holds columns 2c and 2c + 1 of fragments g, g + 8, ...
// They are read before the products of a tile, which hides the latency.
template <int kColumns> struct ColumnValues {
  float scale[kColumns / 64][2], bias[kColumns / 64][2];

  __device__ __forceinline__ void load(const Epilogue& e, int column0) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < kColumns / 64; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = column0 + i * 64 + lane * 2 + j;
        const bool inside = column < static_cast<int>(e.columns);
        scale[i][j] = inside ? __ldg(e.b_scale + column * e.b_step) : 0.0f;
        bias[i][j] = inside ? bias_at(e, column) : 0.0f;
      }
  }
};

// Two neighbouring columns of fragment `f` for the rows `row` and `row + 8` of this thread.
template <typename Sum, int kColumns>
__device__ __forceinline__ void scale_fragment(float (&v)[4], const Sum* s, const ColumnValues<kColumns>& columns,
                                               int f, float scale0, float scale8, bool has_bias) {
  const int from = (f & 7) * 4 + (threadIdx.x & 3);
  const float low = __shfl_sync(~0u, columns.scale[f >> 3][0], from);
  const float high = __shfl_sync(~0u, columns.scale[f >> 3][1], from);
  v[0] = static_cast<float>(s[0]) * scale0 * low;
  v[1] = static_cast<float>(s[1]) * scale0 * high;
  v[2] = static_cast<float>(s[2]) * scale8 * low;
  v[3] = static_cast<float>(s[3]) * scale8 * high;
  if (has_bias) {
    const float b_low = __shfl_sync(~0u, columns.bias[f >> 3][0], from);
    const float b_high = __shfl_sync(~0u, columns.bias[f >> 3][1], from);
    v[0] += b_low, v[2] += b_low;
    v[1] += b_high, v[3] += b_high;
  }
}

// 64 rows of results leave through two staging buffers of 128-byte rows.
template <typename Sum, int kColumns, int kOutBytes>
__device__ __forceinline__ void store_sums(const CUtensorMap& out_map, const ProductShape& p, const Sum* sums,
                                           const ColumnValues<kColumns>& columns, float scale0, float scale8,
                                           uint8_t* staging, int consumer, int row0, int column0) {
  using namespace hopper;
  const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
  const bool has_bias = p.epilogue.bias != nullptr;
  constexpr int kWidth = 128 / kOutBytes, kFragments = kWidth / 8;  // columns and 8-column fragments a buffer holds
#pragma unroll
  for (int part = 0; part < kColumns / kWidth; ++part) {
    uint8_t* buffer = staging + (part & 1) * kStagingBytes;
    if (thread == 0) store_wait_read<1>();
    named_sync(consumer + 1, 128);
#pragma unroll
    for (int f = 0; f < kFragments; f += 2) {
      float v[2][4];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int fragment = part * kFragments + f + side;
        scale_fragment(v[side], sums + fragment * 4, columns, fragment, scale0, scale8, has_bias);
      }
      if constexpr (kOutBytes == 2) {
        const bool bfloat = p.element == kBFloat16;
        const int local = warp * 16 + (lane & 15), chunk = f + (lane >> 4);
        store_matrices(shared_address(buffer) + local * 128 + ((chunk ^ (local & 7)) << 4),
                       pack16(v[0][0], v[0][1], bfloat), pack16(v[0][2], v[0][3], bfloat),
                       pack16(v[1][0], v[1][1], bfloat), pack16(v[1][2], v[1][3], bfloat));
      } else {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int local = warp * 16 + (lane >> 2), chunk = (f + side) * 2 + ((lane & 3) >> 1);
          uint8_t* to = buffer + local * 128 + ((chunk ^ (local & 7)) << 4) + (lane & 1) * 8;
          *reinterpret_cast<float2*>(to) = make_float2(v[side][0], v[side][1]);
          *reinterpret_cast<float2*>(to + 8 * 128) = make_float2(v[side][2], v[side][3]);
        }
      }
    }
    fence_async_proxy();
    named_sync(consumer + 1, 128);
    if (thread == 0) {
      store_tile(&out_map, buffer, column0 + part * kWidth, row0);
      store_commit();
    }
  }
}

// Rows that the copy engine cannot write (not 16-byte aligned) leave one by one.
template <typename Sum, int kColumns>
__device__ __forceinline__ void store_sums_directly(const ProductShape& p, const Sum* sums,
                                                    const ColumnValues<kColumns>& columns, float scale0, float scale8,
                                                    int row0, int column0) {
  const int row = row0 + ((threadIdx.x & 127) >> 5) * 16 + ((threadIdx.x & 31) >> 2);
#pragma unroll
  for (int f = 0; f < kColumns / 8; ++f) {
    float v[4];
    scale_fragment(v, sums + f * 4, columns, f, scale0, scale8, p.epilogue.bias != nullptr);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      store_one(p.epilogue, p.element, row + i / 2 * 8, column0 + f * 8 + (threadIdx.x & 3) * 2 + i % 2, v[i]);
  }
}

template <typename Elements, int kColumns, int kCluster, int kOutBytes>
__device__ __forceinline__ void consume(const CUtensorMap& out_map, const ProductShape& p, const uint8_t* a_ring,
                                        const uint8_t* b_ring, uint8_t* staging, uint64_t* full, uint64_t* empty) {
  using namespace hopper;
  constexpr int kStages = kStagesOf<kColumns>;
  const int consumer = (threadIdx.x >> 7) - 1, thread = threadIdx.x & 127;
  const uint32_t rank = kCluster > 1 ? cluster_rank() : 0;
  const int clusters = gridDim.x / kCluster;
  int stage = 0;
  uint32_t phase = 0;
  typename Elements::Accumulator sums[kColumns / 2];
  for (int index = blockIdx.x / kCluster; index < p.tiles_m * p.tiles_n; index += clusters) {
    const Tile tile(p, index);
    const int row0 = (tile.m * kCluster + rank) * kRows + consumer * 64, column0 = tile.n * kColumns;
    const int row = row0 + (thread >> 5) * 16 + ((thread & 31) >> 2);
    const float scale0 = row_scale(p.epilogue, row), scale8 = row_scale(p.epilogue, row + 8);
    ColumnValues<kColumns> columns;
    columns.load(p.epilogue, column0);
    int last = 0;
    for (int k = 0; k < p.k_steps; ++k) {
      barrier_wait(full + stage, phase);
      const uint64_t a = tile_descriptor(a_ring + stage * kStageBytesA + consumer * 64 * kDepth);
      const uint64_t b = tile_descriptor(b_ring + stage * kColumns * kDepth);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kDepth / 32; ++step)
        Wgmma<Elements, kColumns>::run(sums, a + step * 2, b + step * 2, (k | step) != 0);
      wgmma_commit();
      wgmma_wait<1>();  // the step before has read its stage
      if (k > 0 && thread < kCluster) barrier_arrive_at(empty + last, thread);
      last = stage;
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
    wgmma_wait<0>();
    if (thread < kCluster) barrier_arrive_at(empty + last, thread);
    using Sum = typename Elements::Accumulator;
    if (p.direct)
      store_sums_directly<Sum, kColumns>(p, sums, columns, scale0, scale8, row0, column0);
    else
      store_sums<Sum, kColumns, kOutBytes>(out_map, p, sums, columns, scale0, scale8,
                                           staging + consumer * 2 * kStagingBytes, consumer, row0, column0);
  }
  if (thread == 0) store_wait<0>();
}

template <typename Elements, int kColumns, int kCluster, int kOutBytes, bool kPixels>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                   const __grid_constant__ CUtensorMap out_map, const __grid_constant__ ProductShape p) {
  using namespace hopper;
  extern __shared__ uint8_t raw_shared[];
  constexpr int kStages = kStagesOf<kColumns>;
  uint8_t* shared = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(raw_shared) + 1023) & ~uintptr_t{1023});
  uint8_t* a_ring = shared;
  uint8_t* b_ring = a_ring + kStages * kStageBytesA;
  uint8_t* staging = shared + kRingBytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(staging + 4 * kStagingBytes);
  uint64_t* empty = full + kStages;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + s, 1);
      barrier_init(empty + s, 2 * kCluster);
    }
    barrier_init_fence();
  }
  if constexpr (kCluster > 1) cluster_sync();
  else __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<40>();
    if (threadIdx.x == 0) {
      prefetch_map(&a_map);
      prefetch_map(&b_map);
      produce<Elements, kColumns, kCluster, kPixels>(a_map, b_map, p, a_ring, b_ring, full, empty);
    }
  } else {
    take_registers<232>();
    consume<Elements, kColumns, kCluster, kOutBytes>(out_map, p, a_ring, b_ring, staging, full, empty);
  }
  if constexpr (kCluster > 1) {  // the other block may still write here or signal here
    __syncwarp();
    cluster_sync();
  }
}

// Is the current device one that these kernels run on? Sets the number of its multiprocessors.
inline bool hopper_device(int* multiprocessors) {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  cudaDeviceGetAttribute(multiprocessors, cudaDevAttrMultiProcessorCount, device);
  return major == 9 && minor == 0;
}

template <typename Elements, int kColumns, int kCluster, int kOutBytes, bool kPixels>
int launch_product(const CUtensorMap& a_map, const CUtensorMap& b_map, const CUtensorMap& out_map,
                   const ProductShape& p, int multiprocessors, cudaStream_t stream) {
  auto* kernel = product_kernel<Elements, kColumns, kCluster, kOutBytes, kPixels>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = kCluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  const int clusters = min(p.tiles_m * p.tiles_n, multiprocessors / kCluster);
  config.gridDim = dim3(static_cast<unsigned>(clusters * kCluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  error = cudaLaunchKernelEx(&config, kernel, a_map, b_map, out_map, p);
  return error != cudaSuccess ? static_cast<int>(error) : last_error();
}

// Fills in the tiles, makes the maps of b and out, and launches for the output's width.
template <typename Elements, int kColumns, int kCluster, bool kPixels>
int run_product(const CUtensorMap& a_map, const void* b, int64_t depth, ProductShape p, cudaStream_t stream) {
  int multiprocessors = 0;
  if (!hopper_device(&multiprocessors)) return kNoSuchKernel;
  const Epilogue& e = p.epilogue;
  const int64_t tiles_m = ceil_div(e.rows, int64_t{kRows * kCluster}), tiles_n = ceil_div(e.columns, int64_t{kColumns});
  if (tiles_m * tiles_n > INT32_MAX) return kBadArgument;
  p.tiles_m = static_cast<int>(tiles_m);
  p.tiles_n = static_cast<int>(tiles_n);
  p.group = 16 / kCluster;
  const int out_bytes = map_element(p.element).bytes;
  p.direct = e.columns * out_bytes % 16 != 0 || reinterpret_cast<uintptr_t>(e.out) % 16 != 0;
  CUtensorMap b_map, out_map = {};
  if (const int status = matrix_map(&b_map, b, kInt8, e.columns, depth, kColumns / kCluster)) return status;
  if (!p.direct)
    if (const int status = matrix_map(&out_map, e.out, p.element, e.rows, e.columns, 64)) return status;
  if (out_bytes == 2)
    return launch_product<Elements, kColumns, kCluster, 2, kPixels>(a_map, b_map, out_map, p, multiprocessors, stream);
  return launch_product<Elements, kColumns, kCluster, 4, kPixels>(a_map, b_map, out_map, p, multiprocessors, stream);
}

}  // namespace qsync
