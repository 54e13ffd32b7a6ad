// What AMD's compilers (hipcc, HIPRTC) need beside the plain twins of ptx.cuh, for the multiply-add path: there are no
// tensor-core products and no asynchronous copies here, so the other kernel is not for them.
//
// Our warps have 32 lanes. Where a wavefront has 64, two of them share one: each half only ever exchanges values
// within itself, at distances below 32, and may leave a loop before the other half does.
//
// These kernels were compiled for AMD's GPUs and never ran on one. Two things are up to whoever compiles them: products
// and sums must not be contracted, which the pragma sees to, and subnormal numbers must be kept, which is the
// compilers' default (CuPy's build for ROCm says otherwise: -fcuda-flush-denormals-to-zero).
#pragma once

#pragma clang fp contract(off)

// The second argument means waves of an execution unit there, not blocks of a multiprocessor.
#undef __launch_bounds__
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(1, threads)))

// Newer versions have functions of this name, whose masks speak of all 64 lanes.
#define __shfl_xor_sync(mask, value, distance) __shfl_xor(value, distance, 32)

// HIP's own are plain operators, read before the pragma.
#define __dadd_rn(a, b) amd::add(a, b)
#define __dmul_rn(a, b) amd::multiply(a, b)

namespace amd {
__device__ __forceinline__ double add(double a, double b) { return a + b; }
__device__ __forceinline__ double multiply(double a, double b) { return a * b; }
} // namespace amd
