// Fp8 codes of a matrix in both orders, for the products of the backward pass: an amax pass, then one
// pass that rounds and transposes a 128 x 128 tile through shared memory.
#include "quantize.cuh"

using namespace qsync;

namespace {

constexpr int kTile = 128;
constexpr int kWordsAColumn = kTile / 4;  // a word holds four codes of one column

// A thread rounds 4 rows x 8 columns, stores them in rows, and leaves 8 words (four codes of one column)
// in shared memory. Word `g` (rows 4g .. 4g + 3) of a column lies in 16-byte chunk (g / 4) ^ (column / 8 % 8),
// so that neither the writes (8 column groups x 4 row groups a warp) nor the 16-byte reads share a bank.
// Needs columns % 8 == 0 and 16-byte aligned rows; `vectors` says the same of the transposed rows.
template <typename T, typename Code, bool kStochastic>
__global__ void __launch_bounds__(256) transpose_kernel(const T* __restrict__ x, int64_t rows, int64_t columns,
                                                        bool vectors, const uint32_t* __restrict__ amax,
                                                        uint8_t* __restrict__ q, uint8_t* __restrict__ transposed,
                                                        float* __restrict__ scale, RandomKey random) {
  __shared__ uint4 tile[kTile * kWordsAColumn / 4];
  uint32_t* words = reinterpret_cast<uint32_t*>(tile);
  const Divider divide(scale_of<Code>(*amax));
  const unsigned wide = static_cast<unsigned>(ceil_div(columns, int64_t{kTile}));
  const int64_t row0 = static_cast<int64_t>(blockIdx.x / wide) * kTile;
  const int64_t column0 = static_cast<int64_t>(blockIdx.x % wide) * kTile;
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale = divide.scale;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int column_group = half * 8 + (lane & 7), row_group = warp * 4 + (lane >> 3);
    const int64_t column = column0 + column_group * 8, row = row0 + row_group * 4;
    Raw8<T> raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + i < rows && column < columns) raw[i].load(x + (row + i) * columns + column);
      else raw[i].clear();
    }
    uint2 codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t element = (row + i) * columns + column;
      float v[8];
      raw[i].unpack(v);
      codes[i] = encode8<Code, kStochastic>(v, divide, element, random);
      if (row + i < rows && column < columns) *reinterpret_cast<uint2*>(q + element) = codes[i];
    }
    // Transpose two 4 x 4 blocks of bytes in registers.
    const int place = (((row_group >> 2) ^ (lane & 7)) << 2) | (row_group & 3);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const uint32_t a = side ? codes[0].y : codes[0].x, b = side ? codes[1].y : codes[1].x;
      const uint32_t c = side ? codes[2].y : codes[2].x, d = side ? codes[3].y : codes[3].x;
      const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
      const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
      uint32_t* to = words + (column_group * 8 + side * 4) * kWordsAColumn + place;
      to[0 * kWordsAColumn] = __byte_perm(ab_low, cd_low, 0x5410);
      to[1 * kWordsAColumn] = __byte_perm(ab_low, cd_low, 0x7632);
      to[2 * kWordsAColumn] = __byte_perm(ab_high, cd_high, 0x5410);
      to[3 * kWordsAColumn] = __byte_perm(ab_high, cd_high, 0x7632);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int index = i * 256 + threadIdx.x, column = index >> 3, chunk = index & 7;
    if (column0 + column >= columns) continue;
    const uint4 codes = tile[column * (kWordsAColumn / 4) + (chunk ^ ((column >> 3) & 7))];
    const int64_t row = row0 + chunk * 16, element = (column0 + column) * rows + row;
    if (row >= rows) continue;
    if (vectors) {
      *reinterpret_cast<uint4*>(transposed + element) = codes;
    } else {
      const uint8_t* bytes = reinterpret_cast<const uint8_t*>(&codes);
#pragma unroll
      for (int j = 0; j < 16; ++j)
        if (row + j < rows) transposed[element + j] = bytes[j];
    }
  }
}

// Codes of any shape and alignment, transposed as they are: the slow way for rows that are not aligned.
__global__ void transpose_bytes_kernel(const uint8_t* __restrict__ q, int64_t rows, int64_t columns,
                                       uint8_t* __restrict__ transposed) {
  __shared__ uint8_t tile[32][33];
  const unsigned wide = static_cast<unsigned>(ceil_div(columns, int64_t{32}));
  const int64_t row0 = static_cast<int64_t>(blockIdx.x / wide) * 32;
  const int64_t column0 = static_cast<int64_t>(blockIdx.x % wide) * 32;
  for (int i = threadIdx.y; i < 32; i += 8)
    if (row0 + i < rows && column0 + threadIdx.x < columns)
      tile[i][threadIdx.x] = q[(row0 + i) * columns + column0 + threadIdx.x];
  __syncthreads();
  for (int i = threadIdx.y; i < 32; i += 8)
    if (column0 + i < columns && row0 + threadIdx.x < rows)
      transposed[(column0 + i) * rows + row0 + threadIdx.x] = tile[threadIdx.x][i];
}

template <typename T, typename Code>
int launch(const void* x, void* q, void* transposed, float* scale, uint32_t* amax, int64_t rows, int64_t columns,
           bool stochastic, RandomKey random, cudaStream_t stream) {
  const T* from = static_cast<const T*>(x);
  uint8_t *to = static_cast<uint8_t*>(q), *other = static_cast<uint8_t*>(transposed);
  const auto tiles = [&](int64_t side) { return ceil_div(rows, side) * ceil_div(columns, side); };
  if (tiles(32) > INT32_MAX) return kBadArgument;
  if (columns % 8 != 0 || !aligned(from, 16) || !aligned(to, 8)) {
    const int status = launch_tensor<T, Code>(from, to, scale, amax, rows * columns, stochastic, random, stream);
    if (status) return status;
    transpose_bytes_kernel<<<static_cast<unsigned>(tiles(32)), dim3(32, 8), 0, stream>>>(to, rows, columns, other);
    return last_error();
  }
  if (const int status = launch_amax(from, rows * columns, amax, stream)) return status;
  const unsigned grid = static_cast<unsigned>(tiles(kTile));
  const bool vectors = rows % 16 == 0 && aligned(other, 16);
  if (stochastic)
    transpose_kernel<T, Code, true><<<grid, 256, 0, stream>>>(from, rows, columns, vectors, amax, to, other, scale, random);
  else
    transpose_kernel<T, Code, false><<<grid, 256, 0, stream>>>(from, rows, columns, vectors, amax, to, other, scale, random);
  return last_error();
}

template <typename Code, typename... Arguments> int by_element(int element, Arguments... arguments) {
  switch (element) {
    case kFloat32:
      return launch<float, Code>(arguments...);
    case kBFloat16:
      return launch<__nv_bfloat16, Code>(arguments...);
    case kFloat16:
      return launch<__half, Code>(arguments...);
    default:
      return kBadArgument;
  }
}

}  // namespace

QSYNC_API int qsync_quantize_fp8_transposed(const void* x, int element, void* q, void* transposed, int code,
                                            float* scale, uint32_t* amax, int64_t rows, int64_t columns,
                                            int stochastic, uint64_t key, uint64_t tensor, cudaStream_t stream) {
  const RandomKey random = random_key(key, tensor);
  const bool chance = stochastic != 0;
  if (!device_has_fp8()) return kNoSuchKernel;
  if (code == kE4M3)
    return by_element<E4M3Code>(element, x, q, transposed, scale, amax, rows, columns, chance, random, stream);
  if (code == kE5M2)
    return by_element<E5M2Code>(element, x, q, transposed, scale, amax, rows, columns, chance, random, stream);
  return kBadArgument;
}
