// Messages of bucket codes: where ranges and codes lie in them, and how codes are packed.
//
// A message holds the ranges of its buckets, two float32 each (the least value; the step, or the span where levels
// are learned), and behind them the codes. Eight codes of a bucket, a group, fill `bits` whole bytes. Nothing is
// aligned: messages may lie anywhere in longer rows. Laws: qsync_opt/kernels/bucket_reference.py.
#pragma once

#include "codes.cuh"

namespace qsync {

// Keep in step with SCHEMES in qsync_opt/kernels/bucket_reference.py.
enum Scheme : int { kNearest = 0, kStochastic = 1, kShift = 2 };

constexpr int kGroup = 8;
constexpr int kRangeBytes = 8;
constexpr int kMostLearned = 64;      // levels of a table, of 6 bits
constexpr int kMostBucket = 1 << 24;  // elements: places in a bucket are ints

// Rows of bytes that begin with messages of `buckets` buckets each.
template <typename Byte> struct Messages {
  Byte* first;
  int64_t stride, buckets;
  int bucket_size, bits;

  __device__ __forceinline__ Byte* range_of(int64_t part, int64_t bucket) const {
    return first + part * stride + bucket * kRangeBytes;
  }
  __device__ __forceinline__ Byte* codes_of(int64_t part, int64_t bucket) const {
    return first + part * stride + buckets * kRangeBytes + bucket * (bucket_size / kGroup * bits);
  }
};

inline bool fits(int bits, int bucket_size, int64_t parts, int64_t buckets, int scheme, const float* table) {
  const bool known = bits >= 2 && bits <= 8 && bucket_size >= kGroup && bucket_size <= kMostBucket &&
                     bucket_size % kGroup == 0;
  const bool learned = table == nullptr || (1 << bits <= kMostLearned && scheme != kShift);
  return known && learned && scheme >= kNearest && scheme <= kShift && parts > 0 && parts <= 65535 && buckets > 0;
}

// Widest access, up to 8 bytes, that every one of a row of pieces of `bytes` bytes from p on is aligned for.
__device__ __forceinline__ int unit_of(const void* p, int bytes) {
  const uint32_t set = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) | static_cast<uint32_t>(bytes) | 8u;
  return static_cast<int>(set & (~set + 1));
}

// The lowest `bytes` bytes of a word, up to 8, and back.
template <typename Piece> __device__ __forceinline__ void store_pieces(uint8_t* to, uint64_t word, int bytes) {
#pragma unroll
  for (int i = 0; i < 8; i += sizeof(Piece))
    if (i < bytes) *reinterpret_cast<Piece*>(to + i) = static_cast<Piece>(word >> (8 * i));
}

__device__ __forceinline__ void store_word(uint8_t* to, uint64_t word, int bytes, int unit) {
  if (unit == 8) store_pieces<uint64_t>(to, word, bytes);
  else if (unit == 4) store_pieces<uint32_t>(to, word, bytes);
  else if (unit == 2) store_pieces<uint16_t>(to, word, bytes);
  else store_pieces<uint8_t>(to, word, bytes);
}

template <typename Piece> __device__ __forceinline__ uint64_t load_pieces(const uint8_t* from, int bytes) {
  uint64_t word = 0;
#pragma unroll
  for (int i = 0; i < 8; i += sizeof(Piece))
    if (i < bytes) word |= static_cast<uint64_t>(__ldg(reinterpret_cast<const Piece*>(from + i))) << (8 * i);
  return word;
}

__device__ __forceinline__ uint64_t load_word(const uint8_t* from, int bytes, int unit) {
  if (unit == 8) return load_pieces<unsigned long long>(from, bytes);
  if (unit == 4) return load_pieces<unsigned int>(from, bytes);
  if (unit == 2) return load_pieces<unsigned short>(from, bytes);
  return load_pieces<unsigned char>(from, bytes);
}

__device__ __forceinline__ void store_range(uint8_t* to, float low, float unit) {
  const uint64_t word = __float_as_uint(low) | static_cast<uint64_t>(__float_as_uint(unit)) << 32;
  store_word(to, word, kRangeBytes, unit_of(to, kRangeBytes));
}

__device__ __forceinline__ float2 load_range(const uint8_t* from) {
  const uint64_t word = load_word(from, kRangeBytes, unit_of(from, kRangeBytes));
  return make_float2(__uint_as_float(static_cast<uint32_t>(word)), __uint_as_float(static_cast<uint32_t>(word >> 32)));
}

// What a shift takes off the codes of a bucket, in [-1/2, 1/2).
__device__ __forceinline__ float shift_of(int64_t bucket, const RandomKey& random) {
  return uniform_of(static_cast<uint64_t>(bucket), random) - 0.5f;
}

}  // namespace qsync
