/* What computes on a GPU that is not there: kernels, cuBLAS and the driver. They compute nothing, and say where they
 * would have run: each launch is a line of the log with its stream. (values.py computes what the kernels would have.) */
#include "fake.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <driver_types.h>
#include <vector_types.h>

static Status nothing(void) { return 0; }

/* ---- kernels: nvcc's code registers each by its address on the host when a library is loaded ---- */

typedef struct {
    const void *address;
    const char *name;
} Kernel;

enum { MOST = 1 << 20 }; /* a power of two; torch 2.13 has about 60 thousand */
static Kernel *kernels;  /* by a hash of the address */

static Kernel *place_of(const void *address) {
    size_t at = ((uintptr_t)address >> 4) * 11400714819323198485UL >> 44;
    while (kernels[at].address && kernels[at].address != address)
        at = (at + 1) % MOST;
    return &kernels[at];
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[4];
    return handle;
}

void __cudaRegisterFunction(void **binary, const char *address, char *symbol, const char *name, int threads, void *a,
                            void *b, void *c, void *d, int *e) {
    if (!kernels)
        kernels = calloc(MOST, sizeof *kernels);
    *place_of(address) = (Kernel){address, name};
}

static Status launched(const void *kernel, Stream stream) {
    const char *name = kernels ? place_of(kernel)->name : NULL;
    fake_log("kernel stream=%p name=%.90s", stream, name ? name : "?");
    return 0;
}

Status cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, Stream stream) {
    return launched(kernel, stream);
}

Status cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared,
                                   Stream stream) {
    return launched(kernel, stream);
}

Status cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **args) {
    return launched(kernel, how->stream);
}

Status __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **args, size_t shared, Stream stream) {
    return launched(kernel, stream);
}

Status __cudaGetKernel(void **to, const void *kernel) {
    *to = (void *)kernel;
    return 0;
}

/* `kernel<<<grid, block, shared, stream>>>(...)` pushes these four, and the code that nvcc made takes them off. */
static __thread struct {
    dim3 grid, block;
    size_t shared;
    Stream stream;
} pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, Stream stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return 0;
}

Status __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *(Stream *)stream = pushed.stream;
    return 0;
}

/* ---- cuBLAS and cuSOLVER ---- */

static __thread Stream blas_stream;

static Status multiplied(const char *how) {
    fake_log("kernel stream=%p name=%s", blas_stream, how);
    return 0;
}

static Status opened(void **to) {
    *to = fake_handle();
    return 0;
}

Status cublasCreate_v2(void **to) { return opened(to); }
Status cublasLtCreate(void **to) { return opened(to); }
Status cusolverDnCreate(void **to) { return opened(to); }

Status cublasSetStream_v2(void *handle, Stream stream) {
    blas_stream = stream;
    return 0;
}

Status cublasGetStream_v2(void *handle, Stream *to) {
    *to = blas_stream;
    return 0;
}

Status cublasGetMathMode(void *handle, int *to) { return *to = 0; }
Status cublasGetPointerMode_v2(void *handle, int *to) { return *to = 0; }

Status cublasGetVersion_v2(void *handle, int *to) {
    *to = 130100;
    return 0;
}

size_t cublasLtGetVersion(void) { return 130100; }

/* One algorithm, all zeros (64 bytes of algorithm, then its workspace's size, which is zero, and its state, success). */
Status cublasLtMatmulAlgoGetHeuristic(void *handle, void *what, void *a, void *b, void *c, void *d, void *wish, int most,
                                      void *to, int *found) {
    memset(to, 0, 64 + 8 + 4);
    *found = 1;
    return 0;
}

Status cublasGemmEx(void) { return multiplied("gemm"); }
Status cublasGemmStridedBatchedEx(void) { return multiplied("batched gemm"); }
Status cublasSgemm_v2(void) { return multiplied("gemm of f32"); }
Status cublasSgemmStridedBatched(void) { return multiplied("batched gemm of f32"); }
Status cublasDgemm_v2(void) { return multiplied("gemm of f64"); }

Status cublasLtMatmul(void *handle, void *what, const void *alpha, const void *a, void *a_is, const void *b, void *b_is,
                      const void *beta, const void *c, void *c_is, void *d, void *d_is, const void *algorithm,
                      void *workspace, size_t size, Stream stream) {
    fake_log("kernel stream=%p name=gemm with an epilogue", stream);
    return 0;
}

/* Sizes of workspaces, which torch allocates. */
Status cusolverDnXgeqrf_bufferSize(void *handle, void *how, int64_t m, int64_t n, int type, void *a, int64_t lda,
                                   int tau_type, void *tau, int computed, size_t *on_device, size_t *on_host) {
    *on_device = *on_host = 0;
    return 0;
}

Status cusolverDnSorgqr_bufferSize(void *handle, int m, int n, int k, void *a, int lda, void *tau, int *to) {
    return *to = 0;
}

/* ---- the driver (libcuda), which torch asks for by name, and Triton links with ---- */

Status fake_attribute(int *to, int attribute, int device);

/* Memory that NVLink's switch can add up in, so that ProcessGroupNCCL registers what it allocates. */
enum { MULTICAST = 132 };

Status cuDeviceGetAttribute(int *to, int attribute, int device) {
    fake_attribute(to, attribute, device);
    if (attribute == MULTICAST)
        *to = getenv("FAKEGPU_MULTICAST") != NULL;
    return 0;
}

Status cuDriverGetVersion(int *to) {
    *to = 13000;
    return 0;
}

Status cuDeviceGet(int *to, int number) {
    *to = number;
    return 0;
}

Status cuDeviceGetCount(int *to) {
    *to = 1;
    return 0;
}

static char context; /* its address stands for the context of every device */

Status cuCtxGetCurrent(void **to) {
    *to = &context;
    return 0;
}

Status cuDevicePrimaryCtxRetain(void **to, int device) { return cuCtxGetCurrent(to); }

Status cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return 0;
}

/* CU_POINTER_ATTRIBUTE_CONTEXT is 1, ..._DEVICE_POINTER is 3. */
Status cuPointerGetAttribute(void *to, int attribute, uintptr_t address) {
    *(void **)to = attribute == 3 ? (void *)address : &context;
    return 0;
}

Status cuGetErrorString(int status, const char **to) {
    *to = "an error of the driver";
    return 0;
}

Status cuModuleLoadData(void **to, const void *image) { return opened(to); }
Status cuModuleLoadDataEx(void **to, const void *image, unsigned n, int *options, void **values) { return opened(to); }
Status cuModuleGetFunction(void **to, void *module, const char *name) { return opened(to); }

/* 0 is CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 4 the number of registers. */
Status cuFuncGetAttribute(int *to, int attribute, void *function) {
    *to = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;
    return 0;
}

Status cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, Stream stream, void **args, void **extra) {
    fake_log("kernel stream=%p name=of a module", stream);
    return 0;
}

typedef struct {
    unsigned grid[3], block[3], shared;
    Stream stream;
} Launch; /* the beginning of a CUlaunchConfig */

Status cuLaunchKernelEx(const Launch *how, void *kernel, void **args, void **extra) {
    fake_log("kernel stream=%p name=of a module", how->stream);
    return 0;
}

Status cudaGetDriverEntryPointByVersion(const char *name, void **to, unsigned version, unsigned long long flags,
                                        int *status) {
    void *there = dlsym(RTLD_DEFAULT, name);
    *to = there ? there : (void *)nothing;
    if (status)
        *status = 0;
    return 0;
}
