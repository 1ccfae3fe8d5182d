#!/usr/bin/env bash
# Build the null GPU for the CUDA build of torch in an environment: build.sh ENVIRONMENT FOLDER. It needs g++ and gcc.
#
# FOLDER/run PROGRAM ... then runs a program on it. Libraries that torch finds by name are replaced in LD_LIBRARY_PATH, the others by
# LD_PRELOAD. What they want and null.cpp lacks becomes a function that returns 0.
set -euo pipefail
here=$(cd "${BASH_SOURCE[0]%/*}" && pwd)
environment=$(cd "$1" && pwd)
mkdir -p "$2/include"
out=$(cd "$2" && pwd)
site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cuda=$(printf '%s\n' "$site"/nvidia/cu1[0-9] | tail -1)
ln -sfn "$site/triton/backends/nvidia/include/crt" "$out/include/crt"
touch "$out"/include/cuda_{fp16,bf16,fp8}.h  # of which nccl.h needs nothing
for part in null nccl; do
    g++ -O1 -fPIC -c -I"$out/include" -I"$cuda/include" -I"$site/nvidia/nccl/include" "$here/$part.cpp" -o "$out/$part.o"
done
ours=$(nm -g --defined-only "$out"/{null,nccl}.o | awk '{print $NF}')
# Triton looks up the last ones by name.
prefixes='cublas|cuda[A-Z]|nccl|__cuda|cu(Ctx|Device|Driver|Event|Func|Get|Graph|Init|Kernel|Launch|Library|Link|Mem|Module|Multicast|Occupancy|Pointer|Stream|TensorMap)'
{
    { nm -D --undefined-only "$site"/{torch/lib,triton/backends/nvidia/lib,triton/_C}/*.so 2> /dev/null || true; } \
        | awk '{print $NF}' | sed 's/@.*//' | grep -E "^($prefixes)[A-Za-z0-9_]*$"
    printf '%s\n' cuInit cuCtxSetCurrent cuCtxGetLimit cuCtxSetLimit cuFuncSetAttribute cuFuncSetCacheConfig cuLaunchKernel \
        cuLaunchKernelEx cuLaunchCooperativeKernel cuLinkAddData_v2 cuLinkComplete cuLinkCreate_v2 cuMemMap cuMemSetAccess \
        cuModuleLoad cuModuleUnload cuTensorMapEncodeTiled
} | sort -u | grep -vxF "$ours" > "$out/names"
# Kernels and matrix products are counted.
started='(LaunchKernel|LaunchCooperativeKernel|GraphLaunch|[Gg]emm|cublasLtMatmul$)'
{
    echo 'long null_launches;'
    sed -E "/$started/s/.*/int &(void) { __atomic_add_fetch(\&null_launches, 1, __ATOMIC_RELAXED); return 0; }/; t
        s/.*/int &(void) { return 0; }/" "$out/names"
} > "$out/stubs.c"
gcc -O1 -fPIC -fno-builtin -c "$out/stubs.c" -o "$out/stubs.o"
g++ -shared "$out"/{null,nccl,stubs}.o -o "$out/libcuda.so.1" -Wl,-soname,libcuda.so.1 -ldl -lpthread -lrt
ln -sf libcuda.so.1 "$out/libcuda.so"
cat > "$out/run" << END
#!/usr/bin/env bash
export PATH="$environment/bin:\$PATH" LD_LIBRARY_PATH="$out" TRITON_LIBCUDA_PATH="$out" PYTHONPATH="$here"
export TORCHINDUCTOR_CACHE_DIR="$out/cache/inductor" TRITON_CACHE_DIR="$out/cache/triton"
LD_PRELOAD="$out/libcuda.so.1" exec "\$@"
END
chmod +x "$out/run"
echo "built for $site with $(wc -l < "$out/names") stubs"
