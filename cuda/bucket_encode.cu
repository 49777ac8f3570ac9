// Codes of 2 to 8 bits between the least and the greatest value of each bucket, written into messages.
#include "bucket_codes.cuh"
#include "bucket_range.cuh"
#include "learned_levels.cuh"

using namespace qsync;

namespace {

constexpr int kKept = 4;                            // groups that a thread keeps in registers
constexpr int kMostThreads = 32 * kMostRangeWarps;  // of a block: buckets of up to 8192 elements are read once

// A group in registers as it lies in memory. Past the end of the bucket its first element stands again: the least
// and the greatest stay.
template <typename T> struct Kept {
  Raw8<T> raw;

  __device__ __forceinline__ void load(const T* from, int count, bool vectors) {
    if (vectors && count >= kGroup) {
      raw.load(from);
    } else {
      T* to = reinterpret_cast<T*>(raw.word);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) to[i] = from[i < count ? i : 0];
    }
  }
  __device__ __forceinline__ void unpack(float (&v)[8]) const { raw.unpack(v); }
};

// Four bytes, each of them byte `kByte` of a word.
template <int kByte> __device__ __forceinline__ uint32_t gather_bytes(const uint32_t* word) {
  constexpr uint32_t kTwo = kByte | (kByte + 4) << 4;
  return __byte_perm(__byte_perm(word[0], word[1], kTwo), __byte_perm(word[2], word[3], kTwo), 0x5410);
}

// How places of a bucket, real numbers in [0, 2^bits - 1], become codes.
template <int kScheme> struct Coder {
  int bits;
  float most, shift;
  RandomKey random;

  // A sum of a place and `point` has its whole part from bit 16 on and its fraction below, for eight bits one bit
  // further down: float32 holds no more. A random half word carries into the whole part as often as it should.
  __device__ __forceinline__ uint32_t carried(float place, uint32_t half) const {
    const float point = bits == 8 ? 256.0f : 128.0f;
    return __float_as_uint(place + point) * (bits == 8 ? 2u : 1u) + half;
  }

  // Eight codes from the least significant bit on; `element` is the index of the first.
  __device__ __forceinline__ uint64_t operator()(const float (&place)[8], uint64_t element) const {
    uint32_t bytes[2];
    if constexpr (kScheme == kStochastic) {
      const uint4 drawn = philox(element / kGroup, random);
      const uint32_t word[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t sum[4];
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          sum[i] = carried(place[4 * half + i], word[2 * half + i / 2] & 0xffffu);
          sum[i + 1] = carried(place[4 * half + i + 1], word[2 * half + i / 2] >> 16);
        }
        bytes[half] = gather_bytes<2>(sum);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t sum[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float own = place[4 * half + i];
          // Below it cannot leave the range: -1/2 is not reached, and rounds to 0.
          if (kScheme == kShift) own = fminf(own - shift, most);
          sum[i] = __float_as_uint(own + kRoundingMagic);
        }
        bytes[half] = gather_bytes<0>(sum);
      }
    }
    return pack(bytes[0]) | static_cast<uint64_t>(pack(bytes[1])) << (4 * bits);
  }

  // Four bytes below 2^bits to 4 * bits bits: two products with 1 and 2^bits, added up in one instruction each.
  __device__ __forceinline__ uint32_t pack(uint32_t bytes) const {
    if (bits == 8) return bytes;
    const uint32_t weights = 1u | 1u << (bits + 8);
    return __dp4a(bytes, weights, 0u) + (__dp4a(bytes, weights << 16, 0u) << (2 * bits));
  }
};

// The block's threads in x share a bucket; its rows in y take neighbouring buckets. Block row y of the grid writes
// message y, and zeros where the vector has ended.
template <typename T, int kScheme, bool kLearned>
__global__ void __launch_bounds__(kMostThreads)
    encode_kernel(const T* __restrict__ x, int64_t count, bool vectors, RandomKey random,
                  const float* __restrict__ table, Messages<uint8_t> messages) {
  __shared__ float slots[2][kMostRangeWarps];
  __shared__ LearnedLevels learned;
  const int bits = messages.bits, bucket_size = messages.bucket_size;
  const int64_t bucket = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y, part = blockIdx.y;
  const int64_t place_of_bucket = part * messages.buckets + bucket, start = place_of_bucket * bucket_size;
  const bool inside = bucket < messages.buckets;
  const int size =
      inside ? static_cast<int>(max(min(count - start, static_cast<int64_t>(bucket_size)), int64_t{0})) : 0;
  const int first = threadIdx.x * kGroup, stride = blockDim.x * kGroup;

  Kept<T> kept[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int at = first + i * stride;
    if (at < size) kept[i].load(x + start + at, size - at, vectors);
  }
  if constexpr (kLearned) learned.fill(table, bits);
  Range range;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    float v[8];
    kept[i].unpack(v);
    if (first + i * stride < size) range.add(v);
  }
  for (int at = first + kKept * stride; at < size; at += stride) {
    float v[8];
    Kept<T> own;
    own.load(x + start + at, size - at, vectors);
    own.unpack(v);
    range.add(v);
  }
  range.share(slots);
  if (!inside) return;

  const float low = size > 0 ? range.low : 0.0f, span = size > 0 ? range.high - range.low : 0.0f;
  const float most = kLearned ? 1.0f : static_cast<float>((1 << bits) - 1), unit = kLearned ? span : span / most;
  const bool usable = unit > 0.0f && unit <= FLT_MAX;
  if (threadIdx.x == 0) store_range(messages.range_of(part, bucket), low, unit);
  const Divider divide(usable ? unit : 1.0f);
  const Coder<kScheme> coder = {bits, most, kScheme == kShift ? shift_of(place_of_bucket, random) : 0.0f, random};
  uint8_t* codes = messages.codes_of(part, bucket);
  const int width = unit_of(codes, bits);

  const auto write = [&](float(&place)[8], int at) {
    if constexpr (kLearned) learned.bend(place, bits);
    uint64_t word = usable ? coder(place, start + at) : 0;
    if (size - at < kGroup) word &= (uint64_t{1} << (max(size - at, 0) * bits)) - 1;
    store_word(codes + at / kGroup * bits, word, bits, width);
  };
  if (!divide.plain) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int at = first + i * stride;
      float place[8];
      kept[i].unpack(place);
#pragma unroll
      for (int k = 0; k < kGroup; ++k) place[k] = Divider::divide(place[k] - low, divide.scale, divide.reciprocal);
      if (at < bucket_size) write(place, at);
    }
  }
  // What is not kept, and buckets whose step is so small or so large that only a whole division is exact. There a
  // step below the normal numbers may be rounded so far that the last place is above the last code.
#pragma unroll 1
  for (int at = first + (divide.plain ? 0 : kKept * stride); at < bucket_size; at += stride) {
    float place[8] = {};
    if (at < size) {
      Kept<T> own;
      own.load(x + start + at, size - at, vectors);
      own.unpack(place);
    }
#pragma unroll
    for (int k = 0; k < kGroup; ++k) place[k] = fminf((place[k] - low) / divide.scale, most);
    write(place, at);
  }
}

template <typename T, bool kLearned> auto* kernel_of(int scheme) {
  if constexpr (!kLearned)
    if (scheme == kShift) return encode_kernel<T, kShift, false>;
  return scheme == kStochastic ? encode_kernel<T, kStochastic, kLearned> : encode_kernel<T, kNearest, kLearned>;
}

template <typename T>
int encode(const void* x, int64_t count, int scheme, RandomKey random, const float* table,
           const Messages<uint8_t>& messages, int parts, cudaStream_t stream) {
  const int warps = min(ceil_div(messages.bucket_size, 32 * kGroup * kKept), kMostRangeWarps);
  const dim3 block(static_cast<unsigned>(warps * 32), static_cast<unsigned>(max(4 / warps, 1)));
  const int64_t blocks = ceil_div(messages.buckets, int64_t{block.y});
  if (blocks > INT32_MAX) return kBadArgument;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(parts));
  auto* kernel = table == nullptr ? kernel_of<T, false>(scheme) : kernel_of<T, true>(scheme);
  kernel<<<grid, block, 0, stream>>>(static_cast<const T*>(x), count, aligned(x, 16), random, table, messages);
  return last_error();
}

}  // namespace

QSYNC_API int qsync_message_encode(const void* x, int element, int64_t count, int bits, int bucket_size, int scheme,
                                   const float* table, uint64_t key, uint64_t tensor, void* messages, int64_t stride,
                                   int parts, int64_t buckets, cudaStream_t stream) {
  if (!fits(bits, bucket_size, parts, buckets, scheme, table)) return kBadArgument;
  const Messages<uint8_t> to = {static_cast<uint8_t*>(messages), stride, buckets, bucket_size, bits};
  const RandomKey random = random_key(key, tensor);
  switch (element) {
    case kFloat32:
      return encode<float>(x, count, scheme, random, table, to, parts, stream);
    case kBFloat16:
      return encode<__nv_bfloat16>(x, count, scheme, random, table, to, parts, stream);
    case kFloat16:
      return encode<__half>(x, count, scheme, random, table, to, parts, stream);
    default:
      return kBadArgument;
  }
}
