// Blocks, warps and the instructions of kernels/csrc/device.cuh on one CPU thread: every CUDA thread
// is a fiber, the blocks of a cluster run together, clusters one after another.
//
// Asynchronous copies arrive as late as they may (at the wait), and shared memory begins as NaN, so
// that a kernel that waits too little or reads what nobody wrote gives wrong results here too.
#pragma once
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <memory>
#include <sys/mman.h>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>

#define DEVICE inline
#define KERNEL(threads, blocks) static void
#define SHARED_BYTES(name) unsigned char* name = emulation::current->block->shared.data()
#define SHARED_TILES(name) SHARED_BYTES(name)
#define UNROLL
#define UNROLL4

struct alignas(16) Vec4 {
  u32 x, y, z, w;
};
struct alignas(8) Vec2 {
  u32 x, y;
};

namespace emulation {

struct Barrier {
  int arrived = 0, generation = 0;
};
struct Warp {
  Barrier barrier;
  u64 slots[32][8];
};
struct Copy {
  void* target;
  const void* source;
  int size;
  bool live;
};
struct Block;
struct Fiber {
  ucontext_t start;
  jmp_buf place;
  void* stack;
  bool begun = false, done = false;
  int thread, lane, arrived_at;
  Warp* warp;
  Block* block;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};
struct Block {
  int x, y, z, rank;
  std::vector<unsigned char> shared;
  std::vector<Warp> warps;
  Barrier barrier;
  Barrier named[8];
};
inline Fiber* current;
inline jmp_buf scheduler;
inline std::function<void()>* body;
inline std::vector<Block>* cluster;
inline Barrier cluster_barrier;
inline int threads, grid[3];
inline long progress;

inline void yield() {
  if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}
inline void wait_for(Barrier& b, int need) {
  const int generation = b.generation;
  progress++;
  if (++b.arrived == need) {
    b.arrived = 0;
    b.generation++;
    return;
  }
  while (b.generation == generation) yield();
}
inline void enter() {
  (*body)();
  current->done = true;
  progress++;
  _longjmp(scheduler, 1);
}

constexpr size_t STACK = 96 * 1024;

inline void run_cluster(std::vector<Block>& blocks) {
  const int total = (int)blocks.size() * threads;
  char* stacks = (char*)mmap(nullptr, STACK * total, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) abort();
  std::vector<std::unique_ptr<Fiber>> fibers;
  for (int i = 0; i < total; i++) {
    auto f = std::make_unique<Fiber>();
    f->block = &blocks[i / threads];
    f->thread = i % threads;
    f->lane = f->thread % 32;
    f->warp = &f->block->warps[f->thread / 32];
    f->stack = stacks + STACK * i;
    fibers.push_back(std::move(f));
  }
  cluster = &blocks;
  cluster_barrier = Barrier();
  volatile int left = total;
  volatile int idle = 0;
  time_t idle_since = 0;
  while (left) {
    const long before = progress;
    for (volatile int i = 0; i < total; i = i + 1) {
      Fiber* f = fibers[i].get();
      if (f->done) continue;
      current = f;
      if (!_setjmp(scheduler)) {
        if (f->begun) _longjmp(f->place, 1);
        f->begun = true;
        getcontext(&f->start);
        f->start.uc_stack.ss_sp = f->stack;
        f->start.uc_stack.ss_size = STACK;
        f->start.uc_link = nullptr;
        makecontext(&f->start, enter, 0);
        setcontext(&f->start);
      }
      if (current->done) left = left - 1;
    }
    idle = progress == before ? idle + 1 : 0;
    if (idle == 1) idle_since = time(nullptr);
    if (idle % 1024 == 1023 && time(nullptr) - idle_since > 90) {
      fprintf(stderr, "the kernel waits for ever\n");
      abort();
    }
  }
  munmap(stacks, STACK * total);
}

inline void launch(const u32* dims, std::function<void()> call) {
  // dims: grid x y z, block size, bytes of shared memory, cluster size along x
  threads = (int)dims[3];
  grid[0] = dims[0], grid[1] = dims[1], grid[2] = dims[2];
  body = &call;
  const int size = (int)dims[5];
  for (u32 z = 0; z < dims[2]; z++)
    for (u32 y = 0; y < dims[1]; y++)
      for (u32 x = 0; x < dims[0]; x += size) {
        std::vector<Block> blocks(size);
        for (int r = 0; r < size; r++) {
          Block& b = blocks[r];
          b.x = (int)x + r, b.y = (int)y, b.z = (int)z, b.rank = r;
          b.shared.assign(dims[4] + 128, 0xFF);
          b.warps.resize((threads + 31) / 32);
        }
        run_cluster(blocks);
      }
}

template <class... A, size_t... I>
void apply(void (*f)(A...), void** a, std::index_sequence<I...>) {
  f(*(std::remove_const_t<A>*)a[I]...);
}
template <class... A> void start(void (*f)(A...), const u32* dims, void** a) {
  launch(dims, [=] { apply(f, a, std::index_sequence_for<A...>()); });
}

// One value a lane; afterwards every lane may look at all of them.
template <class T, class F> auto collective(T mine, F look) {
  Warp* w = current->warp;
  static_assert(sizeof(T) <= 64);
  memcpy(w->slots[current->lane], &mine, sizeof(T));
  const int lanes = threads < 32 ? threads : 32;
  wait_for(w->barrier, lanes);
  auto result = look([w](int lane) {
    T v;
    memcpy(&v, w->slots[lane], sizeof(T));
    return v;
  });
  wait_for(w->barrier, lanes);
  return result;
}

inline void arrive(std::vector<Copy>& group) {
  for (const Copy& c : group) {
    if (c.live) memcpy(c.target, c.source, c.size);
    else memset(c.target, 0, c.size);
  }
  group.clear();
}

inline float half_to_float(u16 v) {
  _Float16 h;
  memcpy(&h, &v, 2);
  return (float)h;
}
inline u16 float_to_half(float f) {
  const _Float16 h = (_Float16)f;
  u16 v;
  memcpy(&v, &h, 2);
  return v;
}
inline u16 float_to_bf16(float f) {
  u32 b;
  memcpy(&b, &f, 4);
  if (f != f) return 0x7FFF;
  return (u16)((b + 0x7FFF + ((b >> 16) & 1)) >> 16);
}
inline float e4m3_to_float(u8 v) {
  const int e = (v >> 3) & 15, m = v & 7;
  const float sign = v & 128 ? -1.0f : 1.0f;
  if (e == 15 && m == 7) return NAN;
  return sign * (e ? ldexpf(1.0f + m / 8.0f, e - 7) : ldexpf(m / 8.0f, -6));
}
inline u8 float_to_e4m3(float f) {
  if (f != f) return 0x7F;
  const u8 sign = std::signbit(f) ? 128 : 0;
  const float a = fminf(fabsf(f), 448.0f);
  int exponent;
  frexpf(a, &exponent);
  const int e = a == 0.0f ? -6 : (exponent - 1 < -6 ? -6 : exponent - 1);
  int steps = (int)nearbyintf(ldexpf(a, 3 - e));  // eighths of 2^e
  int field = e + 7;
  if (steps == 16) steps = 8, field++;
  return sign | (steps < 8 ? (u8)steps : (u8)(field << 3 | (steps - 8)));
}

}  // namespace emulation

#define HOST_ENTRY(kernel)                                           \
  extern "C" void kernel##_on_host(const u32* dims, void** a) {      \
    emulation::start(kernel, dims, a);                               \
  }

inline int thread_id() { return emulation::current->thread; }
inline int block_x() { return emulation::current->block->x; }
inline int block_y() { return emulation::current->block->y; }
inline int block_z() { return emulation::current->block->z; }
inline int grid_x() { return emulation::grid[0]; }
inline int grid_y() { return emulation::grid[1]; }
inline int block_size() { return emulation::threads; }
inline void sync_block() {
  emulation::wait_for(emulation::current->block->barrier, emulation::threads);
}
inline void sync_some(int barrier, int threads) {
  emulation::wait_for(emulation::current->block->named[barrier], threads);
}
inline void sync_warp() { emulation::wait_for(emulation::current->warp->barrier, 32); }

inline Vec4 load16(const void* p) {
  if ((uintptr_t)p & 15) abort();
  Vec4 v;
  memcpy(&v, p, 16);
  return v;
}
inline Vec4 load16_volatile(const void* p) { return load16(p); }
inline void store16(void* p, Vec4 v) {
  if ((uintptr_t)p & 15) abort();
  memcpy(p, &v, 16);
}
inline int load_acquire_system(const int* p) {
  emulation::yield();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline int load_relaxed_system(const int* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline void store_release_system(int* p, int v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline int load_volatile(const int* p) { return *(const volatile int*)p; }
inline float load_volatile(const float* p) { return *(const volatile float*)p; }
inline void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void fence_device() {}
inline int add_acq_rel(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
inline int swap_if(int* p, int expected, int v) {
  __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
}
inline int add_shared(int* p, int v) {
  const int old = *p;
  *p += v;
  return old;
}
inline void add_shared(u64* p, u64 v) { *p += v; }
inline u64 nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (u64)t.tv_sec * 1000000000ull + t.tv_nsec;
}
inline void copy16_async(void* shared, const void* global, bool live = true) {
  if (((uintptr_t)shared | (live ? (uintptr_t)global : 0)) & 15) abort();
  emulation::current->open.push_back({shared, global, 16, live});
}
inline void copy8_async(void* shared, const void* global, bool live = true) {
  if (((uintptr_t)shared | (live ? (uintptr_t)global : 0)) & 7) abort();
  emulation::current->open.push_back({shared, global, 8, live});
}
inline void copies_commit() {
  emulation::current->groups.push_back(std::move(emulation::current->open));
  emulation::current->open.clear();
}
template <int LEFT> inline void copies_wait() {
  auto& groups = emulation::current->groups;
  while ((int)groups.size() > LEFT) {
    emulation::arrive(groups.front());
    groups.pop_front();
  }
}
inline void let_next_start() {}
inline void await_previous() {}

inline int cluster_rank() { return emulation::current->block->rank; }
inline void cluster_arrive() {
  emulation::Barrier& b = emulation::cluster_barrier;
  emulation::current->arrived_at = b.generation;
  emulation::progress++;
  if (++b.arrived == emulation::threads * (int)emulation::cluster->size()) {
    b.arrived = 0;
    b.generation++;
  }
}
inline void cluster_wait() {
  while (emulation::cluster_barrier.generation == emulation::current->arrived_at) emulation::yield();
}
inline void sync_cluster() {
  cluster_arrive();
  cluster_wait();
}
inline float peer_load(const float* p, int rank) {
  const size_t offset = (unsigned char*)p - emulation::current->block->shared.data();
  float v;
  memcpy(&v, (*emulation::cluster)[rank].shared.data() + offset, 4);
  return v;
}
inline void peer_load4(const float* p, int rank, float* v) {
  for (int i = 0; i < 4; i++) v[i] = peer_load(p + i, rank);
}

inline void peer_store(float* p, int rank, float v) {
  const size_t offset = (unsigned char*)p - emulation::current->block->shared.data();
  memcpy((*emulation::cluster)[rank].shared.data() + offset, &v, 4);
}

inline u32 lane_xor(u32 v, int mask) {
  return emulation::collective(v, [=](auto get) { return get(emulation::current->lane ^ mask); });
}
inline int lane_xor(int v, int mask) { return (int)lane_xor((u32)v, mask); }
inline float lane_xor(float v, int mask) {
  return emulation::collective(v, [=](auto get) { return get(emulation::current->lane ^ mask); });
}
inline int lane_up(int v, int by) {
  return emulation::collective(v, [=](auto get) {
    const int lane = emulation::current->lane;
    return lane >= by ? get(lane - by) : v;
  });
}
inline u64 lane_xor(u64 v, int mask) {
  return emulation::collective(v, [=](auto get) { return get(emulation::current->lane ^ mask); });
}
inline u64 lane_up(u64 v, int by) {
  return emulation::collective(v, [=](auto get) {
    const int lane = emulation::current->lane;
    return lane >= by ? get(lane - by) : v;
  });
}
inline int lane_of(int v, int lane) {
  return emulation::collective(v, [=](auto get) { return get(lane & 31); });
}
inline u32 lane_vote(bool v) {
  return emulation::collective(v, [=](auto get) {
    u32 bits = 0;
    for (int i = 0; i < 32; i++) bits |= (u32)get(i) << i;
    return bits;
  });
}
inline u32 lanes_with(int v) {
  return emulation::collective(v, [=](auto get) {
    u32 bits = 0;
    for (int i = 0; i < 32; i++) bits |= (u32)(get(i) == v) << i;
    return bits;
  });
}
inline u32 lane_max(u32 v) {
  return emulation::collective(v, [=](auto get) {
    u32 most = v;
    for (int i = 0; i < 32; i++) most = get(i) > most ? get(i) : most;
    return most;
  });
}
inline u32 lane_min(u32 v) { return ~lane_max(~v); }
inline int count_bits(u32 v) { return __builtin_popcount(v); }

inline float as_float(u32 v) {
  float f;
  memcpy(&f, &v, 4);
  return f;
}
inline u32 as_bits(float f) {
  u32 v;
  memcpy(&v, &f, 4);
  return v;
}
inline float exp2_fast(float x) { return exp2f(x); }
inline float exp_(float x) { return expf(x); }
inline float log_(float x) { return logf(x); }
inline float sqrt_(float x) { return sqrtf(x); }
inline float rsqrt_(float x) { return 1.0f / sqrtf(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float infinity() { return INFINITY; }
inline float nan_() { return as_float(0x7FFFFFFF); }
inline float maximum(float a, float b) { return fmaxf(a, b); }
inline float minimum(float a, float b) { return fminf(a, b); }
inline u32 multiply_high(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
inline u32 pack_f16x2(float low, float high) {
  return emulation::float_to_half(low) | (u32)emulation::float_to_half(high) << 16;
}
inline u32 pack_bf16x2(float low, float high) {
  return emulation::float_to_bf16(low) | (u32)emulation::float_to_bf16(high) << 16;
}
inline float f16_to_float(u16 v) { return emulation::half_to_float(v); }
inline u32 mul_f16x2(u32 a, u32 b) {
  return pack_f16x2(f16_to_float((u16)a) * f16_to_float((u16)b),
                    f16_to_float((u16)(a >> 16)) * f16_to_float((u16)(b >> 16)));
}
inline u32 e4m3x2_to_f16x2(u16 v) {
  return pack_f16x2(emulation::e4m3_to_float((u8)v), emulation::e4m3_to_float((u8)(v >> 8)));
}
inline u16 pack_e4m3x2(float low, float high) {
  return emulation::float_to_e4m3(low) | (u16)(emulation::float_to_e4m3(high) << 8);
}
inline u32 permute_bytes(u32 a, u32 b, u32 selector) {
  const u64 all = (u64)b << 32 | a;
  u32 d = 0;
  for (int i = 0; i < 4; i++) d |= (u32)((all >> (8 * ((selector >> (4 * i)) & 7))) & 255) << (8 * i);
  return d;
}

template <class Convert>
inline void multiply_fragments(float* d, const u32* a, u32 b0, u32 b1, Convert convert) {
  struct Fragments {
    u32 a[4], b[2];
  };
  const Fragments mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  emulation::collective(mine, [=](auto get) {
    const int lane = emulation::current->lane, row = lane / 4, column = 2 * (lane % 4);
    auto half = [=](u32 v, int i) { return convert((u16)(v >> (16 * i))); };
    for (int i = 0; i < 4; i++) {
      double sum = 0;
      for (int k = 0; k < 16; k++) {
        // a: lane (row, k pair) holds rows r and r + 8, k pairs and k pairs + 8
        const Fragments x = get(row * 4 + (k % 8) / 2);
        const Fragments y = get((column + i % 2) * 4 + (k % 8) / 2);
        sum += (double)half(x.a[(k / 8) * 2 + i / 2], k % 2) * half(y.b[k / 8], k % 2);
      }
      d[i] = (float)(d[i] + sum);
    }
    return 0;
  });
}
inline void mma_f16(float* d, const u32* a, u32 b0, u32 b1) {
  multiply_fragments(d, a, b0, b1, [](u16 v) { return f16_to_float(v); });
}
inline void mma_bf16(float* d, const u32* a, u32 b0, u32 b1) {
  multiply_fragments(d, a, b0, b1, [](u16 v) { return as_float((u32)v << 16); });
}
inline void read_matrices(u32* r, const void* row, bool transposed) {
  if ((uintptr_t)row & 15) abort();
  emulation::collective(row, [=](auto get) {
    const int lane = emulation::current->lane;
    for (int m = 0; m < 4; m++) {
      u32 v = 0;
      for (int i = 0; i < 2; i++) {
        const int at_row = transposed ? 2 * (lane % 4) + i : lane / 4;
        const int at_column = transposed ? lane / 4 : 2 * (lane % 4) + i;
        v |= (u32)((const u16*)get(8 * m + at_row))[at_column] << (16 * i);
      }
      r[m] = v;
    }
    return 0;
  });
}
inline void load_matrices(u32* r, const void* row) { read_matrices(r, row, false); }
inline void load_matrices_transposed(u32* r, const void* row) { read_matrices(r, row, true); }

// Four warps: shared memory as the descriptors name it, read through the 128-byte swizzle.
inline u32 shared_address(const void* p) {
  return (u32)((unsigned char*)p - emulation::current->block->shared.data());
}
inline void fence_matrix_memory() {}
inline void warps_begin() {}
inline void warps_commit() {}
inline void warps_wait() {}
inline void arrived(float&) {}
template <int COLUMNS> inline void warps_mma_e4m3(float* d, u64 a, u64 b, bool add) {
  const unsigned char* base = emulation::current->block->shared.data();
  auto element = [=](u64 what, int row, int k) {
    if (what >> 62 != 1 || (what >> 49 & 7)) abort();  // 128-byte swizzle, tiles at multiples of 1024
    const u32 group = (u32)(what >> 32 & 0x3FFF) << 4;
    const u32 at = ((u32)(what & 0x3FFF) << 4) + row / 8 * group + row % 8 * 128 + k;
    return emulation::e4m3_to_float(base[at ^ ((at >> 7 & 7) << 4)]);
  };
  const int thread = emulation::current->thread % 128, lane = thread % 32;
  for (int j = 0; j < COLUMNS / 8; j++)
    for (int i = 0; i < 4; i++) {
      const int row = thread / 32 * 16 + lane / 4 + i / 2 * 8, column = j * 8 + lane % 4 * 2 + i % 2;
      double sum = add ? d[j * 4 + i] : 0.0;
      for (int k = 0; k < 32; k++) sum += (double)element(a, row, k) * element(b, column, k);
      d[j * 4 + i] = (float)sum;
    }
}
