// One-shot all-reduce: see kernels/all_reduce.py for the protocol and the layout of the memory.
//
// Build with IN, OUT: element types of x and of the result (0 fp32, 1 bf16, 2 fp16).
#include "device.cuh"

constexpr int MAX_RANKS = 8, CHANNELS = 8, HEADER_BYTES = 4096;
constexpr int ABORT = 0, STATUS = 1, EPOCHS = 8, FLAGS = 32;

KERNEL(512, 1)
all_reduce_kernel(const u8* x, void* out, const i64* memories, int numel, int share, int capacity,
                  int rank, int world, i64 timeout_ns) {
  SHARED_BYTES(shared);
  volatile int* state = (volatile int*)shared;  // epoch, failed
  constexpr int SIZE = Element<IN>::BYTES, PER_VECTOR = 16 / SIZE;
  const int channel = block_x(), thread = thread_id();
  u8* own = (u8*)memories[rank];
  int* header = (int*)own;
  const i64 begin = (i64)channel * share;
  const int count = min_(share, numel - (int)begin), vectors = count * SIZE / 16;
  if (thread == 0) {
    state[0] = header[EPOCHS + channel] + 1;
    state[1] = load_relaxed_system(header + STATUS) != 0;
  }
  sync_block();
  const int epoch = state[0];
  const i64 regions = HEADER_BYTES + ((i64)channel * 2 + (epoch & 1)) * world * capacity * 4;
  const u8* source = x + begin * SIZE;
  if (!state[1]) {
    const i64 mine = regions + (i64)rank * capacity * 4;
    for (int i = thread; i < vectors; i += block_size()) {
      const Vec4 v = load16(source + (i64)i * 16);
      for (int p = 0; p < world; p++) {  // every rank begins with itself: no peer is hit by all
        const int target = rank + p < world ? rank + p : rank + p - world;
        store16((u8*)memories[target] + mine + (i64)i * 16, v);
      }
    }
    fence_system();
    sync_block();
    if (thread < world) {
      int* flags = (int*)memories[thread] + FLAGS + channel * MAX_RANKS;
      store_release_system(flags + rank, epoch);
      const int* flag = header + FLAGS + channel * MAX_RANKS + thread;
      const u64 deadline = nanoseconds() + (u64)timeout_ns;
      int reason = 0;
      for (u32 turn = 1; load_acquire_system(flag) - epoch < 0 && !reason; turn++) {
        if (turn & 63) continue;
        if (load_relaxed_system(header + ABORT)) reason = 2;
        else if (nanoseconds() > deadline) reason = 1;
      }
      if (reason) {
        swap_if(header + STATUS, 0, reason | thread << 8);
        state[1] = 1;
      }
    }
  }
  sync_block();
  if (thread == 0) header[EPOCHS + channel] = epoch;
  const bool failed = state[1];
  for (int i = thread; i < vectors; i += block_size()) {
    float sum[PER_VECTOR];
    UNROLL for (int j = 0; j < PER_VECTOR; j++) sum[j] = failed ? nan_() : 0.0f;
    for (int p = 0; p < world && !failed; p++) {
      float part[PER_VECTOR];
      Element<IN>::unpack(load16_volatile(own + regions + (i64)p * capacity * 4 + (i64)i * 16), part);
      UNROLL for (int j = 0; j < PER_VECTOR; j++) sum[j] += part[j];
    }
    UNROLL for (int j = 0; j < PER_VECTOR; j++)
      Element<OUT>::store(out, begin + (i64)i * PER_VECTOR + j, sum[j]);
  }
}
HOST_ENTRY(all_reduce_kernel)
