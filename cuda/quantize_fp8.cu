// Fp8 codes (e4m3, e5m2) of a matrix with one scale a tensor, a row or a column.
#include "quantize.cuh"

using namespace qsync;

namespace {

template <typename Code, typename... Arguments> int by_element(int element, Arguments... arguments) {
  switch (element) {
    case kFloat32:
      return launch_quantize<float, Code>(arguments...);
    case kBFloat16:
      return launch_quantize<__nv_bfloat16, Code>(arguments...);
    case kFloat16:
      return launch_quantize<__half, Code>(arguments...);
    default:
      return kBadArgument;
  }
}

}  // namespace

// As qsync_quantize_int8, with the element type of the codes.
QSYNC_API int qsync_quantize_fp8(const void* x, int element, void* q, int code, float* scale, uint32_t* amax,
                                 int64_t rows, int64_t columns, int64_t row_distance, int granularity, int stochastic,
                                 uint64_t key, uint64_t tensor, cudaStream_t stream) {
  const RandomKey random = random_key(key, tensor);
  const bool chance = stochastic != 0;
  if (!device_has_fp8()) return kNoSuchKernel;
  if (code == kE4M3)
    return by_element<E4M3Code>(element, x, q, scale, amax, rows, columns, row_distance, granularity, chance, random,
                                stream);
  if (code == kE5M2)
    return by_element<E5M2Code>(element, x, q, scale, amax, rows, columns, row_distance, granularity, chance, random,
                                stream);
  return kBadArgument;
}
