// A GPU that is not there: it takes the place of libcuda, libcudart and cuBLAS (build.sh), and computes nothing. NCCL is in
// nccl.cpp.
//
// Device memory is address space of this process, so that copies from and to the host are real. Kernels, and copies
// within the device, do nothing. NULL_MIB and NULL_CC are the card's memory and compute capability (90 = 9.0). Of NULL_DEVICES
// cards, each process uses one. A call that is illegal while a graph is captured prints "NULL GPU: ..."; functions that are not
// here return 0 (success).
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

static int setting(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}
static const int CAPABILITY = setting("NULL_CC", 90), DEVICES = setting("NULL_DEVICES", 1);
static thread_local int current = 0;  // the device of this thread
static const size_t MEMORY = size_t(setting("NULL_MIB", 143771)) << 20;
static const size_t SMALL = 4 << 20;  // a larger copy or fill within the device would only cost memory
static const bool HOLDS = setting("NULL_HOLDS", 1);  // 0: nor does it hold what the host copies to it, if that is larger
static void *const HANDLE = (void *)0x1000;  // of what has no state

// ---------------------------------------------------------------------------------------------- memory

struct Ranges {  // of addresses; never destroyed, because libraries free memory when the process ends
    std::mutex mutex;
    std::map<char *, size_t> sizes;

    void *reserve(size_t bytes) {
        void *start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start == MAP_FAILED) return nullptr;
        std::lock_guard<std::mutex> lock(mutex);
        sizes[(char *)start] = bytes;
        return start;
    }
    size_t release(void *start) {
        std::lock_guard<std::mutex> lock(mutex);
        auto found = sizes.find((char *)start);
        if (found == sizes.end()) return 0;
        size_t bytes = found->second;
        munmap(start, bytes);
        sizes.erase(found);
        return bytes;
    }
    bool contains(const void *address) {
        std::lock_guard<std::mutex> lock(mutex);
        auto next = sizes.upper_bound((char *)address);
        return next != sizes.begin() && (char *)address < std::prev(next)->first + std::prev(next)->second;
    }
};
static Ranges &device = *new Ranges, &pinned = *new Ranges;
static std::atomic<size_t> used{size_t(600) << 20};  // by the context

// --------------------------------------------------------------------- captures of graphs, and errors

static thread_local cudaError_t last = cudaSuccess;
static thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
static std::atomic<cudaStream_t> captured{nullptr};
static std::atomic<pthread_t> captor{0};

static cudaError_t failed(cudaError_t error) { return last = error; }
static bool illegal(const char *call, bool is) {
    if (is) fprintf(stderr, "NULL GPU: %s while a graph is captured\n", call);
    return is;
}
static bool in_capture() { return captured && pthread_equal(captor, pthread_self()) && mode != cudaStreamCaptureModeRelaxed; }

EXPORT cudaError_t cudaGetLastError() {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}
EXPORT cudaError_t cudaPeekAtLastError() { return last; }
EXPORT const char *cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "not permitted when stream is capturing"; }
EXPORT const char *cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheNullGpu"; }

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    captured = stream, captor = pthread_self();
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *graph) {
    captured = nullptr;
    *graph = (cudaGraph_t)HANDLE;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    *status = stream && stream == captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    return (CUresult)cudaStreamIsCapturing(stream, (cudaStreamCaptureStatus *)status);
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id,
                                            cudaGraph_t *graph, const cudaGraphNode_t **, const cudaGraphEdgeData **, size_t *count) {
    cudaStreamIsCapturing(stream, status);
    if (id) *id = *status == cudaStreamCaptureStatusActive;
    if (graph) *graph = (cudaGraph_t)HANDLE;
    if (count) *count = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *other) {
    std::swap(mode, *other);
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *run, cudaGraph_t, unsigned long long) {
    *run = (cudaGraphExec_t)HANDLE;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *run, cudaGraph_t graph, unsigned long long) { return cudaGraphInstantiateWithFlags(run, graph, 0); }
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t *, size_t *count) {
    *count = 1;
    return cudaSuccess;
}
// The host waits in these.
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return illegal("cudaStreamSynchronize", stream && stream == captured) ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
EXPORT cudaError_t cudaDeviceSynchronize() { return illegal("cudaDeviceSynchronize", in_capture()) ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess; }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) { return illegal("cudaEventSynchronize", in_capture()) ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess; }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t) { return illegal("cudaEventQuery", in_capture()) ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess; }

// ---------------------------------------------------------------------------- memory, as torch asks for it

EXPORT cudaError_t cudaMalloc(void **start, size_t bytes) {
    if (illegal("cudaMalloc", in_capture())) return failed(cudaErrorStreamCaptureUnsupported);
    if (used + bytes > MEMORY || !(*start = device.reserve(bytes))) return failed(cudaErrorMemoryAllocation);
    used += bytes;
    return cudaSuccess;
}
EXPORT cudaError_t cudaFree(void *start) {
    if (start && illegal("cudaFree", in_capture())) return failed(cudaErrorStreamCaptureUnsupported);
    used -= device.release(start);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *free = MEMORY - used, *total = MEMORY;
    return cudaSuccess;
}
EXPORT cudaError_t cudaHostAlloc(void **start, size_t bytes, unsigned) { return (*start = pinned.reserve(bytes)) ? cudaSuccess : failed(cudaErrorMemoryAllocation); }
EXPORT cudaError_t cudaMallocHost(void **start, size_t bytes) { return cudaHostAlloc(start, bytes, 0); }
EXPORT cudaError_t cudaFreeHost(void *start) {
    pinned.release(start);
    return cudaSuccess;
}
EXPORT cudaError_t cudaHostGetDevicePointer(void **address, void *start, unsigned) {
    *address = start;
    return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address) {
    memset(attributes, 0, sizeof *attributes);
    bool on_device = device.contains(address), is_pinned = pinned.contains(address);
    attributes->type = on_device ? cudaMemoryTypeDevice : is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    if (on_device || is_pinned) attributes->devicePointer = (void *)address, attributes->device = current;
    if (is_pinned) attributes->hostPointer = (void *)address;
    return cudaSuccess;
}
static cudaError_t copy(void *to, const void *from, size_t bytes, cudaStream_t stream) {
    bool within = device.contains(to) && device.contains(from);
    illegal("a copy from or to the host", !within && stream && stream == captured);
    bool holds = HOLDS ? !within : !device.contains(to);
    if (holds || bytes <= SMALL) memmove(to, from, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) { return copy(to, from, bytes, stream); }
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) { return copy(to, from, bytes, nullptr); }
EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t stream) { return copy(to, from, bytes, stream); }
EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
    for (size_t row = 0; row < height; row++) memmove((char *)to + row * to_pitch, (char *)from + row * from_pitch, width);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t) {
    if (bytes <= SMALL) memset(to, value, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }

// Expandable segments: addresses are reserved, and physical memory is counted.
EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) {
    *bytes = 2 << 20;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *start, size_t bytes, size_t, CUdeviceptr, unsigned long long) { return (*start = (CUdeviceptr)device.reserve(bytes)) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY; }
EXPORT CUresult cuMemAddressFree(CUdeviceptr start, size_t) {
    device.release((void *)start);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *, unsigned long long) {
    if (used + bytes > MEMORY) return CUDA_ERROR_OUT_OF_MEMORY;
    used += *handle = bytes;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    used -= handle;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) {
    madvise((void *)start, bytes, MADV_DONTNEED);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)value = address;
    else *(int *)value = attribute != CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? 0 : device.contains((void *)address) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------- the device

static void describe(cudaDeviceProp *card, int device = 0) {
    bool large = CAPABILITY == 80 || (CAPABILITY >= 90 && CAPABILITY < 120);  // of a data center
    memset(card, 0, sizeof *card);
    strcpy(card->name, "NVIDIA null GPU");
    card->major = CAPABILITY / 10, card->minor = CAPABILITY % 10, card->totalGlobalMem = MEMORY;
    card->multiProcessorCount = 132, card->warpSize = 32, card->maxThreadsPerBlock = 1024;
    card->regsPerBlock = card->regsPerMultiprocessor = 65536;
    card->sharedMemPerBlock = 49152;
    card->sharedMemPerBlockOptin = CAPABILITY == 75 ? 65536 : CAPABILITY == 80 ? 166912 : large ? 232448 : 101376;
    card->sharedMemPerMultiprocessor = card->sharedMemPerBlockOptin + 1024;
    card->maxThreadsPerMultiProcessor = CAPABILITY == 75 ? 1024 : large ? 2048 : 1536;
    card->maxThreadsDim[0] = card->maxThreadsDim[1] = 1024, card->maxThreadsDim[2] = 64;
    card->maxGridSize[0] = 2147483647, card->maxGridSize[1] = card->maxGridSize[2] = 65535;
    card->l2CacheSize = 60 << 20, card->textureAlignment = 512, card->unifiedAddressing = 1;
    for (int byte = 0; byte < 16; byte++) card->uuid.bytes[byte] = byte + 1 + device;
}
static int attribute_of(int attribute) {
    cudaDeviceProp card;
    describe(&card);
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
        case cudaDevAttrMaxBlockDimZ: return 64;
        case cudaDevAttrMaxGridDimX: return card.maxGridSize[0];
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return card.maxGridSize[1];
        case cudaDevAttrMaxSharedMemoryPerBlock: return card.sharedMemPerBlock;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return card.sharedMemPerBlockOptin;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return card.sharedMemPerMultiprocessor;
        case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
        case cudaDevAttrWarpSize: return card.warpSize;
        case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return card.regsPerBlock;
        case cudaDevAttrMultiProcessorCount: return card.multiProcessorCount;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return card.maxThreadsPerMultiProcessor;
        case cudaDevAttrL2CacheSize: return card.l2CacheSize;
        case cudaDevAttrComputeCapabilityMajor: return card.major;
        case cudaDevAttrComputeCapabilityMinor: return card.minor;
        case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
        case cudaDevAttrClockRate: case cudaDevAttrMemoryClockRate: return 2000000;
        case cudaDevAttrGlobalMemoryBusWidth: return 6144;
        case cudaDevAttrIntegrated: return 0;
        default: return 1;  // it has what is asked for
    }
}
EXPORT cudaError_t cudaSetDevice(int device) {
    current = device;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp *card, int device) {
    describe(card, device);
    return cudaSuccess;
}
#define GIVES(type, name, value, ...) EXPORT type name(__VA_ARGS__) { *result = value; return (type)0; }
GIVES(cudaError_t, cudaGetDeviceCount, DEVICES, int *result)
GIVES(cudaError_t, cudaGetDevice, current, int *result)
GIVES(cudaError_t, cudaDeviceGetAttribute, attribute_of(attribute), int *result, cudaDeviceAttr attribute, int)
GIVES(cudaError_t, cudaDriverGetVersion, CUDART_VERSION, int *result)
GIVES(cudaError_t, cudaRuntimeGetVersion, CUDART_VERSION, int *result)
GIVES(cudaError_t, cudaDeviceCanAccessPeer, 0, int *result, int, int)
GIVES(cudaError_t, cudaStreamGetPriority, 0, cudaStream_t, int *result)
GIVES(cudaError_t, cudaDeviceGetDefaultMemPool, (cudaMemPool_t)HANDLE, cudaMemPool_t *result, int)
GIVES(cudaError_t, cudaOccupancyMaxActiveBlocksPerMultiprocessor, 2, int *result, const void *, int, size_t)
GIVES(cudaError_t, cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 2, int *result, const void *, int, size_t, unsigned)
GIVES(CUresult, cuDriverGetVersion, CUDART_VERSION, int *result)
GIVES(CUresult, cuDeviceGetCount, DEVICES, int *result)
GIVES(CUresult, cuDeviceGet, number, CUdevice *result, int number)
GIVES(CUresult, cuDeviceGetAttribute, attribute_of(attribute), int *result, CUdevice_attribute attribute, CUdevice)
GIVES(CUresult, cuDeviceTotalMem_v2, MEMORY, size_t *result, CUdevice)
GIVES(CUresult, cuCtxGetCurrent, (CUcontext)HANDLE, CUcontext *result)
GIVES(CUresult, cuCtxGetDevice, current, CUdevice *result)
GIVES(CUresult, cuDevicePrimaryCtxRetain, (CUcontext)HANDLE, CUcontext *result, CUdevice)
GIVES(CUresult, cuDevicePrimaryCtxGetState, 1, CUdevice, unsigned *, int *result)
GIVES(CUresult, cuModuleLoadData, (CUmodule)HANDLE, CUmodule *result, const void *)
GIVES(CUresult, cuModuleLoadDataEx, (CUmodule)HANDLE, CUmodule *result, const void *, unsigned, CUjit_option *, void **)
GIVES(CUresult, cuModuleGetFunction, (CUfunction)HANDLE, CUfunction *result, CUmodule, const char *)
GIVES(CUresult, cuFuncGetAttribute, attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0,
      int *result, CUfunction_attribute attribute, CUfunction)
GIVES(CUresult, cuOccupancyMaxActiveClusters, 1, int *result, CUfunction, const CUlaunchConfig *)
GIVES(CUresult, cuOccupancyMaxActiveBlocksPerMultiprocessor, 2, int *result, CUfunction, int, size_t)
GIVES(CUresult, cuGetErrorString, "an error of the null GPU", CUresult, const char **result)
EXPORT CUresult cuDeviceGetName(char *name, int size, CUdevice) {
    snprintf(name, size, "NVIDIA null GPU");
    return CUDA_SUCCESS;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) {
    snprintf(id, size, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest) {
    *lowest = 0, *highest = -5;
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *value) {
    *(size_t *)value = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *) {
    static char memory[1 << 16];
    *address = memory;
    return cudaSuccess;
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024, attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = CAPABILITY == 89 ? 86 : CAPABILITY;  // torch has no code for 8.9
    attributes->maxDynamicSharedSizeBytes = attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return cudaSuccess;
}

// ----------------------------------------------------------------------------------- streams and events

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
    static std::atomic<size_t> number{0x10000};
    *stream = (cudaStream_t)(number += 16);
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    *event = (cudaEvent_t) new double(0);
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete (double *)event;
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    *(double *)event = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t second) {
    *milliseconds = std::max(0.001, *(double *)second - *(double *)first);
    return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

// ------------------------------------------------------------------------------- look-ups by name, cuBLAS

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult *result) {
    static void *self = [] {
        Dl_info info;
        dladdr((void *)cuDeviceGetCount, &info);
        return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    *function = dlsym(self, name);
    if (!*function) *function = dlsym(self, (std::string(name) + "_v2").c_str());
    if (!*function) *function = (void *)+[] { return CUDA_ERROR_NOT_SUPPORTED; };
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int, cuuint64_t, CUdriverProcAddressQueryResult *) {
    cudaGetDriverEntryPointByVersion(name, function, 0, 0, nullptr);
    return CUDA_SUCCESS;
}
GIVES(int, cublasCreate_v2, HANDLE, void **result)
GIVES(int, cublasLtCreate, HANDLE, void **result)
GIVES(int, cublasGetMathMode, 0, void *, int *result)
GIVES(int, cublasGetPointerMode_v2, 0, void *, int *result)
GIVES(int, cublasGetStream_v2, nullptr, void *, void **result)
GIVES(int, cublasLtMatmulAlgoGetHeuristic, 1, void *, void *, void *, void *, void *, void *, void *, int, void *, int *result)
