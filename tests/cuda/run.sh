#!/bin/sh
# Builds and runs the CUDA codec's test without torch, then once more under compute-sanitizer where that exists.
#   tests/cuda/run.sh [build directory]       ARCH=sm_90 chooses the architecture, default that of this machine's GPU
set -eu
cd "$(dirname "$0")/../.."
out=${1:-build/cuda_test}
mkdir -p "$out"
rm -f "$out"/*.o
flags="-std=c++17 -O3 -arch=${ARCH:-native} -DZIPCCL_WITH_CUDA -Icsrc"
for f in csrc/codec/*.cpp csrc/codec/*.cu; do
  nvcc $flags -c "$f" -o "$out/$(basename "$f").o" &
done
nvcc $flags -c tests/cuda/codec_cuda_test.cu -o "$out/codec_cuda_test.cu.o" &
wait
nvcc -arch="${ARCH:-native}" "$out"/*.o -o "$out/codec_cuda_test"
"$out/codec_cuda_test"
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck synccheck; do
    echo "compute-sanitizer $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$out/codec_cuda_test" --quick
  done
fi
