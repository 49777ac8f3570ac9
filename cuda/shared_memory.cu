// Memory of a GPU that several processes use, and events that order their use of it: what the
// runtime calls IPC. Handles are opaque bytes, which another process opens on the same GPU.
#include "common.cuh"

#include <cstring>

static_assert(sizeof(cudaIpcMemHandle_t) == 64 && sizeof(cudaIpcEventHandle_t) == 64,
              "qsync_opt/kernels/shared_memory.py hands over 64 bytes");

QSYNC_API int qsync_shared_make(int64_t bytes, void** address, unsigned char* handle) {
  int status = static_cast<int>(cudaMalloc(address, static_cast<size_t>(bytes)));
  if (status != cudaSuccess) return status;
  cudaIpcMemHandle_t made;
  status = static_cast<int>(cudaIpcGetMemHandle(&made, *address));
  if (status == cudaSuccess)
    std::memcpy(handle, &made, sizeof made);
  else
    cudaFree(*address);
  return status;
}

QSYNC_API int qsync_shared_free(void* address) { return static_cast<int>(cudaFree(address)); }

QSYNC_API int qsync_shared_open(const unsigned char* handle, void** address) {
  cudaIpcMemHandle_t given;
  std::memcpy(&given, handle, sizeof given);
  return static_cast<int>(cudaIpcOpenMemHandle(address, given, cudaIpcMemLazyEnablePeerAccess));
}

QSYNC_API int qsync_shared_close(void* address) { return static_cast<int>(cudaIpcCloseMemHandle(address)); }

QSYNC_API int qsync_event_make(void** event, unsigned char* handle) {
  cudaEvent_t made;
  int status = static_cast<int>(cudaEventCreateWithFlags(&made, cudaEventDisableTiming | cudaEventInterprocess));
  if (status != cudaSuccess) return status;
  *event = made;
  cudaIpcEventHandle_t told;
  status = static_cast<int>(cudaIpcGetEventHandle(&told, made));
  if (status == cudaSuccess)
    std::memcpy(handle, &told, sizeof told);
  else
    cudaEventDestroy(made);
  return status;
}

QSYNC_API int qsync_event_open(const unsigned char* handle, void** event) {
  cudaIpcEventHandle_t given;
  std::memcpy(&given, handle, sizeof given);
  return static_cast<int>(cudaIpcOpenEventHandle(reinterpret_cast<cudaEvent_t*>(event), given));
}

QSYNC_API int qsync_event_free(void* event) {
  return static_cast<int>(cudaEventDestroy(static_cast<cudaEvent_t>(event)));
}

QSYNC_API int qsync_event_record(void* event, void* stream) {
  return static_cast<int>(cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)));
}

// A stream waits for what was recorded last when this is called; the host does not.
QSYNC_API int qsync_event_wait(void* event, void* stream) {
  return static_cast<int>(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0));
}
