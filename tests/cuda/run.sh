#!/bin/sh
# Builds and runs the tests of the CUDA codec and quantiser without torch, then once more under compute-sanitizer where
# that exists.
#   tests/cuda/run.sh [build directory]       ARCH=sm_90 chooses the architecture, default that of this machine's GPU
set -eu
cd "$(dirname "$0")/../.."
out=${1:-build/cuda_test}
mkdir -p "$out/tests"
rm -f "$out"/*.o "$out"/tests/*.o
flags="-std=c++17 -O3 -arch=${ARCH:-native} -Xcompiler=-ffp-contract=off -DZIPCCL_WITH_CUDA -Icsrc"
tests="codec_cuda_test sum_cuda_test quantizer_cuda_test dense_cuda_test"
for f in csrc/codec/*.cpp csrc/codec/*.cu csrc/quantizer/*.cpp csrc/quantizer/*.cu; do
  nvcc $flags -c "$f" -o "$out/$(basename "$f").o" &
done
for t in $tests; do
  nvcc $flags -c "tests/cuda/$t.cu" -o "$out/tests/$t.o" &
done
wait
for t in $tests; do
  nvcc -arch="${ARCH:-native}" "$out"/*.o "$out/tests/$t.o" -o "$out/$t"
  "$out/$t"
done
command -v compute-sanitizer >/dev/null || exit 0
for tool in memcheck racecheck synccheck initcheck; do
  for t in $tests; do
    # racecheck takes the copies of sum_cuda.cu for races: docs/kernels.md, "Checks".
    [ "$tool $t" = "racecheck sum_cuda_test" ] && continue
    echo "compute-sanitizer $tool $t"
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$out/$t" --quick
  done
done
