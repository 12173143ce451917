// What the native CUDA benchmarks share: errors, and the time of a call inside a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

inline void check(bool good, const char* what) {
  if (good) return;
  std::printf("failed: %s\n", what);
  std::exit(1);
}
#define CUDA(call) check((call) == cudaSuccess, #call)

// Device time of what `enqueue` puts on a stream: captured once, the median of `replays` after `first` others.
inline double median_seconds(int first, int replays, const std::function<void(cudaStream_t)>& enqueue) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t begin, end;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  enqueue(stream);
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CUDA(cudaEventCreate(&begin));
  CUDA(cudaEventCreate(&end));
  std::vector<double> seconds;
  for (int i = 0; i < first + replays; ++i) {
    float ms = 0;
    CUDA(cudaEventRecord(begin, stream));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaEventRecord(end, stream));
    CUDA(cudaEventSynchronize(end));
    CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i >= first) seconds.push_back(1e-3 * ms);
  }
  CUDA(cudaEventDestroy(begin));
  CUDA(cudaEventDestroy(end));
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaStreamDestroy(stream));
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}
