// Stores to memory that other devices read, in as weak an order as PTX allows: each lands at a drawn time, after later
// ones or before. Only what is ordered by system scope lands before something: what the thread stored itself, and what
// others of its block stored before a barrier. A narrower scope orders nothing for other devices.
#include <mutex>

namespace weak {
struct Store {
  float *at, value;
  int thread;
  unsigned round; // barriers that the block had passed
};

inline std::mutex lock;
inline std::vector<std::pair<const emulator::Block *, Store>> pending;
inline uint64_t random = 88172645463325252u;

UNCHECKED inline void land(size_t which) {
  __atomic_store(pending[which].second.at, &pending[which].second.value, __ATOMIC_RELAXED);
  pending.erase(pending.begin() + which);
}

UNCHECKED inline void store(float *at, float value) {
  const emulator::Fiber *me = emulator::current;
  const std::lock_guard<std::mutex> held(lock);
  pending.push_back({me->block, {at, value, me->index, me->block->barrier.round}});
  if (emulator::draw(random, 4) == 0) land(emulator::draw(random, pending.size()));
}

// What is ordered before this thread's next stores has landed.
UNCHECKED inline void fence_system() {
  const emulator::Fiber *me = emulator::current;
  const std::lock_guard<std::mutex> held(lock);
  for (size_t i = pending.size(); i-- > 0;) {
    const Store &each = pending[i].second;
    const bool ordered = each.thread == me->index || each.round < me->block->barrier.round;
    if (pending[i].first == me->block && ordered) land(i);
  }
}

inline void fence_gpu() {}

template <class T> void store_release(T *at, T value) {
  fence_system();
  emulator::store_release(at, value);
}
} // namespace weak
