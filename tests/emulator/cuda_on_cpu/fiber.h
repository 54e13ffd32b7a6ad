// A fiber: a stack of its own and a place to go on from. Sanitizers are told of every switch, so that they take each
// CUDA thread for a thread.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define EMULATOR_TSAN 1
#else
#define EMULATOR_TSAN 0
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define EMULATOR_ASAN 1
#else
#define EMULATOR_ASAN 0
#endif
// The emulator's own bookkeeping is not what the sanitizers should look at.
#define UNCHECKED __attribute__((no_sanitize("thread", "address", "undefined"), noinline))

namespace emulator {

constexpr size_t STACK_BYTES = 256 << 10;

// Saves where the running fiber is to *from and goes on at `to`.
extern "C" void emulator_switch(void **from, void *to);

#if defined(__x86_64__)
asm(R"(
.text
.weak emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emulator_switch,.-emulator_switch
)");
// A fresh stack looks as if `start` had been about to be returned to; the slot above stands for its caller.
UNCHECKED inline void *prepare_stack(char *top, void (*start)()) {
  void **p = reinterpret_cast<void **>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15});
  *--p = nullptr;
  *--p = reinterpret_cast<void *>(start);
  for (int i = 0; i < 6; ++i) *--p = nullptr;
  return p;
}
#elif defined(__aarch64__)
asm(R"(
.text
.weak emulator_switch
.type emulator_switch,%function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emulator_switch,.-emulator_switch
)");
UNCHECKED inline void *prepare_stack(char *top, void (*start)()) {
  uint64_t *p = reinterpret_cast<uint64_t *>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15}) - 20;
  memset(p, 0, 160);
  p[11] = reinterpret_cast<uint64_t>(start); // x30, where ret goes
  return p;
}
#else
#error "the emulator can switch fibers on x86-64 and aarch64 only"
#endif

// Stacks come straight from the kernel: sanitizers would otherwise track every byte of them.
inline char *map_stacks(int count) {
  return reinterpret_cast<char *>(syscall(SYS_mmap, nullptr, STACK_BYTES * count, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}
inline void unmap_stacks(char *stacks, int count) { syscall(SYS_munmap, stacks, STACK_BYTES * count); }

// What can be switched to: a fiber, or the operating system's thread that runs the block.
struct Context {
  void *stack_pointer = nullptr;
  const void *stack_bottom = nullptr;
  size_t stack_bytes = 0;
  void *tsan = nullptr;
  void *fake_stack = nullptr; // AddressSanitizer's
};

// Goes from one context to the other. `last`: the first will not be come back to.
UNCHECKED inline void switch_context(Context &from, Context &to, bool last) {
#if EMULATOR_TSAN
  __tsan_switch_to_fiber(to.tsan, 1 /* no synchronisation: a switch orders nothing between CUDA threads */);
#endif
#if EMULATOR_ASAN
  __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack, to.stack_bottom, to.stack_bytes);
#endif
  (void)last;
  emulator_switch(&from.stack_pointer, to.stack_pointer);
#if EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

} // namespace emulator
