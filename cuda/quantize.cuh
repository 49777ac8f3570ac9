// Quantisation kernels: amax, scale and rounding, fused into as few passes as the granularity allows.
//
// x is a row-major [rows, columns] matrix without gaps, except that `row_kernel` takes a distance
// between rows. Random bits are keyed by the element's place in row-major order.
#pragma once

#include "codes.cuh"

namespace qsync {

constexpr int kUnits = 4;  // groups of eight elements that a thread of `row_kernel` keeps in registers
constexpr int kBlock = 256;

// One pass: a row stays in the registers of its block's threads between the maximum and the rounding. (Measured on
// an H200: a block a row beats a warp a row, and blocks that walk over rows with the next one on its way; with 40
// registers a thread, and so more rows at once, 43 us instead of 48.)
// Needs columns % 8 == 0 and 16-byte aligned rows.
template <typename T, typename Code, bool kStochastic>
__global__ void __maxnreg__(sizeof(T) == 2 && !kStochastic ? 40 : 64)
    row_kernel(const T* __restrict__ x, uint8_t* __restrict__ q, float* __restrict__ scale, int64_t rows, int columns,
               int64_t row_distance, RandomKey random) {
  __shared__ uint32_t slots[32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;  // blockDim.y > 1 only where a row is one warp: nobody waits for it
  const T* from = x + row * row_distance;
  Raw8<T> raw[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int column = (threadIdx.x + u * blockDim.x) * 8;
    if (column < columns) raw[u].load(from + column);
    else raw[u].clear();
  }
  RawMax<T> most;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) most.add(raw[u]);
  const Divider divide(scale_of<Code>(block_max(most.bits(), slots)));
  if (threadIdx.x == 0) scale[row] = divide.scale;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int column = (threadIdx.x + u * blockDim.x) * 8;
    if (column < columns) {
      float v[8];
      raw[u].unpack(v);
      const int64_t element = row * columns + column;
      *reinterpret_cast<uint2*>(q + element) = encode8<Code, kStochastic>(v, divide, element, random);
    }
  }
}

// Any row length and alignment: the row is read twice, the second time mostly from the cache.
template <typename T, typename Code>
__global__ void row_two_pass_kernel(const T* __restrict__ x, uint8_t* __restrict__ q, float* __restrict__ scale,
                                    int64_t columns, int64_t row_distance, bool stochastic, RandomKey random) {
  __shared__ uint32_t slots[32];
  const int64_t row = blockIdx.x;
  const T* from = x + row * row_distance;
  uint32_t most = 0;
  for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) most = max(most, magnitude(to_float(from[c])));
  const Divider divide(scale_of<Code>(block_max(most, slots)));
  if (threadIdx.x == 0) scale[row] = divide.scale;
  for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) {
    const int64_t element = row * columns + c;
    const uint8_t code = encode1<Code>(divide(to_float(from[c])), stochastic, element, random);
    q[element] = divide.usable ? code : 0;
  }
}

// Largest magnitude of a whole tensor, by an atomic maximum into a word that starts at 0.
template <typename T>
__global__ void amax_kernel(const T* __restrict__ x, int64_t count, bool vectors, uint32_t* __restrict__ amax) {
  __shared__ uint32_t slots[32];
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kBlock;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  const int64_t units = vectors ? count / 8 : 0;
  RawMax<T> packed;
  int64_t unit = first;
  for (; unit + 3 * threads < units; unit += 4 * threads) {
    Raw8<T> raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i].load(x + (unit + i * threads) * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) packed.add(raw[i]);
  }
  for (; unit < units; unit += threads) {
    Raw8<T> raw;
    raw.load(x + unit * 8);
    packed.add(raw);
  }
  uint32_t most = packed.bits();
  for (int64_t i = units * 8 + first; i < count; i += threads) most = max(most, magnitude(to_float(x[i])));
  most = block_max(most, slots);
  if (threadIdx.x == 0 && most != 0) atomicMax(amax, most);
}

// Codes of a whole tensor from its amax.
template <typename T, typename Code, bool kStochastic>
__global__ void cast_kernel(const T* __restrict__ x, int64_t count, bool vectors, const uint32_t* __restrict__ amax,
                            uint8_t* __restrict__ q, float* __restrict__ scale, RandomKey random) {
  const Divider divide(scale_of<Code>(*amax));
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kBlock;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (first == 0) *scale = divide.scale;
  const int64_t units = vectors ? count / 8 : 0;
  // From the end to the start: what the maximum's pass read last is still in the cache.
  int64_t unit = units - 1 - first;
  for (; unit - threads >= 0; unit -= 2 * threads) {
    Raw8<T> raw[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) raw[i].load(x + (unit - i * threads) * 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t element = (unit - i * threads) * 8;
      float v[8];
      raw[i].unpack(v);
      *reinterpret_cast<uint2*>(q + element) = encode8<Code, kStochastic>(v, divide, element, random);
    }
  }
  if (unit >= 0) {
    Raw8<T> raw;
    raw.load(x + unit * 8);
    float v[8];
    raw.unpack(v);
    *reinterpret_cast<uint2*>(q + unit * 8) = encode8<Code, kStochastic>(v, divide, unit * 8, random);
  }
  for (int64_t i = units * 8 + first; i < count; i += threads) {
    const uint8_t code = encode1<Code>(divide(to_float(x[i])), kStochastic, i, random);
    q[i] = divide.usable ? code : 0;
  }
}

constexpr int kStripRows = 8;  // rows a block of the column kernels reads at once: 32 x 8 threads

template <typename T>
__device__ __forceinline__ void load_unit(const T* from, int64_t column, int64_t columns, bool vectors, float (&v)[8]) {
  if (vectors) {
    Raw8<T> raw;
    raw.load(from + column);
    raw.unpack(v);
  } else {
    Raw8<T>::load_some(from + column, static_cast<int>(min(columns - column, int64_t{8})), v);
  }
}

// Largest magnitude of each column, by atomic maxima into words that start at 0.
template <typename T>
__global__ void column_amax_kernel(const T* __restrict__ x, int64_t rows, int64_t columns, bool vectors,
                                   uint32_t* __restrict__ amax) {
  __shared__ uint32_t strip[kStripRows][32 * 8 + 8];
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * 8;
  uint32_t most[8] = {};
  if (column < columns)
    for (int64_t row = blockIdx.y * kStripRows + threadIdx.y; row < rows; row += gridDim.y * kStripRows) {
      float v[8];
      load_unit(x + row * columns, column, columns, vectors, v);
#pragma unroll
      for (int i = 0; i < 8; ++i) most[i] = max(most[i], magnitude(v[i]));
    }
#pragma unroll
  for (int i = 0; i < 8; ++i) strip[threadIdx.y][i * 33 + threadIdx.x] = most[i];
  __syncthreads();
  // One thread a column of the block: 256 of each.
  const int own = threadIdx.y * 32 + threadIdx.x, place = (own & 7) * 33 + (own >> 3);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) largest = max(largest, strip[i][place]);
  const int64_t own_column = static_cast<int64_t>(blockIdx.x) * 256 + own;
  if (own_column < columns && largest != 0) atomicMax(amax + own_column, largest);
}

template <typename T, typename Code, bool kStochastic>
__global__ void column_cast_kernel(const T* __restrict__ x, int64_t rows, int64_t columns, bool vectors,
                                   const uint32_t* __restrict__ amax, uint8_t* __restrict__ q,
                                   float* __restrict__ scale, RandomKey random) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * 8;
  if (column >= columns) return;
  const int count = static_cast<int>(min(columns - column, int64_t{8}));
  float scales[8], reciprocals[8];
  bool plain = false;
  uint2 usable = make_uint2(0, 0);  // bytes of ones where the scale is finite
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Divider divide(i < count ? scale_of<Code>(amax[column + i]) : 1.0f);
    scales[i] = divide.scale;
    reciprocals[i] = divide.reciprocal;
    plain |= divide.plain;
    (i < 4 ? usable.x : usable.y) |= divide.usable ? 0xffu << (i % 4 * 8) : 0u;
    if (i < count && blockIdx.y == 0 && threadIdx.y == 0) scale[column + i] = divide.scale;
  }
  for (int64_t row = blockIdx.y * kStripRows + threadIdx.y; row < rows; row += gridDim.y * kStripRows) {
    float v[8];
    load_unit(x + row * columns, column, columns, vectors, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = plain ? v[i] / scales[i] : Divider::divide(v[i], scales[i], reciprocals[i]);
    const int64_t element = row * columns + column;
    if (vectors) {
      uint2 codes;
      codes.x = encode4<Code, kStochastic>(v[0], v[1], v[2], v[3], element >> 2, random) & usable.x;
      codes.y = encode4<Code, kStochastic>(v[4], v[5], v[6], v[7], (element >> 2) + 1, random) & usable.y;
      *reinterpret_cast<uint2*>(q + element) = codes;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t mask = (i < 4 ? usable.x : usable.y) >> (i % 4 * 8);
        if (i < count) q[element + i] = encode1<Code>(v[i], kStochastic, element + i, random) & mask;
      }
    }
  }
}

// The zeroed word or words that an amax pass fills.
inline int clear(uint32_t* amax, int64_t count, cudaStream_t stream) {
  return static_cast<int>(cudaMemsetAsync(amax, 0, count * sizeof(uint32_t), stream));
}

inline unsigned grid_for(int64_t units) {  // enough blocks to fill any chip, few enough for the atomics
  return static_cast<unsigned>(max(int64_t{1}, min(ceil_div(units, int64_t{kBlock} * 4), int64_t{2048})));
}

template <typename T>
int launch_amax(const T* x, int64_t count, uint32_t* amax, cudaStream_t stream) {
  if (const int status = clear(amax, 1, stream)) return status;
  amax_kernel<T><<<grid_for(ceil_div(count, int64_t{8})), kBlock, 0, stream>>>(x, count, aligned(x, 16), amax);
  return last_error();
}

template <typename T, typename Code>
int launch_rows(const T* x, uint8_t* q, float* scale, int64_t rows, int64_t columns, int64_t row_distance,
                bool stochastic, RandomKey random, cudaStream_t stream) {
  if (rows > INT32_MAX) return kBadArgument;
  const bool vectors = columns % 8 == 0 && aligned(x, 16) && aligned(q, 8) && row_distance * sizeof(T) % 16 == 0;
  if (!vectors || columns > 1024 * kUnits * 8) {
    const int block = columns >= 2048 ? 512 : 128;
    row_two_pass_kernel<T, Code><<<static_cast<unsigned>(rows), block, 0, stream>>>(x, q, scale, columns, row_distance,
                                                                                   stochastic, random);
    return last_error();
  }
  const int width = static_cast<int>(columns), threads = ceil_div(ceil_div(width / 8, kUnits), 32) * 32;
  const dim3 block(static_cast<unsigned>(threads), threads == 32 ? 4 : 1);
  const unsigned grid = static_cast<unsigned>(ceil_div(rows, int64_t{block.y}));
  auto* kernel = stochastic ? row_kernel<T, Code, true> : row_kernel<T, Code, false>;
  kernel<<<grid, block, 0, stream>>>(x, q, scale, rows, width, row_distance, random);
  return last_error();
}

template <typename T, typename Code>
int launch_tensor(const T* x, uint8_t* q, float* scale, uint32_t* amax, int64_t count, bool stochastic,
                  RandomKey random, cudaStream_t stream) {
  if (const int status = launch_amax(x, count, amax, stream)) return status;
  const bool vectors = aligned(x, 16) && aligned(q, 8);
  const unsigned grid = grid_for(ceil_div(count, int64_t{8}));
  if (stochastic) cast_kernel<T, Code, true><<<grid, kBlock, 0, stream>>>(x, count, vectors, amax, q, scale, random);
  else cast_kernel<T, Code, false><<<grid, kBlock, 0, stream>>>(x, count, vectors, amax, q, scale, random);
  return last_error();
}

template <typename T, typename Code>
int launch_columns(const T* x, uint8_t* q, float* scale, uint32_t* amax, int64_t rows, int64_t columns,
                   bool stochastic, RandomKey random, cudaStream_t stream) {
  if (const int status = clear(amax, columns, stream)) return status;
  const bool vectors = columns % 8 == 0 && aligned(x, 16) && aligned(q, 8);
  const dim3 block(32, kStripRows);
  const dim3 grid(static_cast<unsigned>(ceil_div(columns, int64_t{256})),
                  static_cast<unsigned>(min(ceil_div(rows, int64_t{kStripRows * 16}), int64_t{1024})));
  column_amax_kernel<T><<<grid, block, 0, stream>>>(x, rows, columns, vectors, amax);
  if (const int status = last_error()) return status;
  if (stochastic)
    column_cast_kernel<T, Code, true><<<grid, block, 0, stream>>>(x, rows, columns, vectors, amax, q, scale, random);
  else
    column_cast_kernel<T, Code, false><<<grid, block, 0, stream>>>(x, rows, columns, vectors, amax, q, scale, random);
  return last_error();
}

enum Granularity : int { kTensor = 0, kRow = 1, kColumn = 2 };

template <typename T, typename Code>
int launch_quantize(const void* x, void* q, float* scale, uint32_t* amax, int64_t rows, int64_t columns,
                    int64_t row_distance, int granularity, bool stochastic, RandomKey random, cudaStream_t stream) {
  const T* from = static_cast<const T*>(x);
  uint8_t* to = static_cast<uint8_t*>(q);
  if (granularity == kRow)
    return launch_rows<T, Code>(from, to, scale, rows, columns, row_distance, stochastic, random, stream);
  if (row_distance != columns) return kBadArgument;
  if (granularity == kColumn)
    return launch_columns<T, Code>(from, to, scale, amax, rows, columns, stochastic, random, stream);
  return launch_tensor<T, Code>(from, to, scale, amax, rows * columns, stochastic, random, stream);
}

}  // namespace qsync
