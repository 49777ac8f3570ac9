// What a launcher's return value means, in words.
#include "common.cuh"

QSYNC_API const char* qsync_status_text(int status) {
  switch (status) {
    case qsync::kBadArgument:
      return "an argument is out of the kernel's range";
    case qsync::kNoSuchKernel:
      return "the library holds no such kernel for this device";
    case qsync::kNoTensorMap:
      return "the driver refused the tensor map";
    default:
      return cudaGetErrorString(static_cast<cudaError_t>(status));
  }
}
