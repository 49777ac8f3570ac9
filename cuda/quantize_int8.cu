// Int8 codes of a matrix with one scale a tensor, a row or a column.
#include "quantize.cuh"

using namespace qsync;

// amax: scratch, one word for the tensor or one a column; unused for rows.
QSYNC_API int qsync_quantize_int8(const void* x, int element, void* q, float* scale, uint32_t* amax, int64_t rows,
                                  int64_t columns, int64_t row_distance, int granularity, int stochastic, uint64_t key,
                                  uint64_t tensor, cudaStream_t stream) {
  const RandomKey random = random_key(key, tensor);
  switch (element) {
    case kFloat32:
      return launch_quantize<float, Int8Code>(x, q, scale, amax, rows, columns, row_distance, granularity, stochastic,
                                              random, stream);
    case kBFloat16:
      return launch_quantize<__nv_bfloat16, Int8Code>(x, q, scale, amax, rows, columns, row_distance, granularity,
                                                      stochastic, random, stream);
    case kFloat16:
      return launch_quantize<__half, Int8Code>(x, q, scale, amax, rows, columns, row_distance, granularity, stochastic,
                                               random, stream);
    default:
      return kBadArgument;
  }
}
