// Device helpers that the CUDA C++ kernels share: one thin function per instruction that C++ has no
// word for. Includes nothing, so that NVRTC and nvcc compile it alike for sm_90a and sm_120a.
//
// With DECANT_HOST the same kernels are compiled by a C++ compiler against an emulation of blocks,
// warps and these instructions (the tests bring it), and run on the CPU.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef DECANT_HOST
#include "cuda_on_host.h"
#else

#define DEVICE __device__ __forceinline__
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define HOST_ENTRY(kernel)
#define SHARED_BYTES(name) extern __shared__ __align__(128) unsigned char name[]
#define SHARED_TILES(name) extern __shared__ __align__(1024) unsigned char name[]  // for swizzled tiles
#define UNROLL _Pragma("unroll")
#define UNROLL4 _Pragma("unroll 4")

struct alignas(16) Vec4 {
  u32 x, y, z, w;
};
struct alignas(8) Vec2 {
  u32 x, y;
};

DEVICE int thread_id() { return threadIdx.x; }
DEVICE int block_x() { return blockIdx.x; }
DEVICE int block_y() { return blockIdx.y; }
DEVICE int block_z() { return blockIdx.z; }
DEVICE int grid_x() { return gridDim.x; }
DEVICE int grid_y() { return gridDim.y; }
DEVICE int block_size() { return blockDim.x; }

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
// A barrier of some whole warps of the block; barrier 0 is sync_block's.
DEVICE void sync_some(int barrier, int threads) {
  asm volatile("bar.sync %0,%1;" :: "r"(barrier), "r"(threads) : "memory");
}

// -- memory ---------------------------------------------------------------------------------------

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE Vec4 load16(const void* p) { return *(const Vec4*)p; }
// Written by another processor: never from a cache line that was read before.
DEVICE Vec4 load16_volatile(const void* p) {
  Vec4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEVICE void store16(void* p, Vec4 v) { *(Vec4*)p = v; }
DEVICE int load_acquire_system(const int* p) {
  int v;
  asm volatile("ld.acquire.sys.global.s32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE int load_relaxed_system(const int* p) {
  int v;
  asm volatile("ld.relaxed.sys.global.s32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store_release_system(int* p, int v) {
  asm volatile("st.release.sys.global.s32 [%0],%1;" :: "l"(p), "r"(v) : "memory");
}
DEVICE int load_volatile(const int* p) { return *(const volatile int*)p; }
DEVICE float load_volatile(const float* p) { return *(const volatile float*)p; }
DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE int add_acq_rel(int* p, int v) {
  int old;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0,[%1],%2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
DEVICE int swap_if(int* p, int expected, int v) { return atomicCAS(p, expected, v); }
DEVICE int add_shared(int* p, int v) { return atomicAdd(p, v); }
DEVICE void add_shared(u64* p, u64 v) { atomicAdd(p, v); }
DEVICE u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(t));
  return t;
}

// 16 bytes from global to shared memory behind the thread's back; no bytes (zeros) unless `live`.
DEVICE void copy16_async(void* shared, const void* global, bool live = true) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0],[%1],16,%2;"
               :: "r"(shared_address(shared)), "l"(global), "r"(live ? 16 : 0) : "memory");
}
DEVICE void copy8_async(void* shared, const void* global, bool live = true) {
  asm volatile("cp.async.ca.shared.global [%0],[%1],8,%2;"
               :: "r"(shared_address(shared)), "l"(global), "r"(live ? 8 : 0) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void copies_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}

// Programmatic dependent launch: the next kernel may start; this one needs its predecessor's results.
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// -- clusters -------------------------------------------------------------------------------------

DEVICE int cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0,%cluster_ctarank;" : "=r"(r));
  return (int)r;
}
// Arrived: what this thread wrote may be read by those that have waited.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
DEVICE void sync_cluster() {
  cluster_arrive();
  cluster_wait();
}
// Four floats of the shared memory of another block of the cluster, at the place of `p` here.
DEVICE void peer_load4(const float* p, int rank, float* v) {
  u32 at;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3},[%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(at) : "memory");
}
DEVICE float peer_load(const float* p, int rank) {
  u32 at;
  float v;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0,[%1];" : "=f"(v) : "r"(at) : "memory");
  return v;
}

// One float into the shared memory of another block of the cluster, at the place of `p` here.
DEVICE void peer_store(float* p, int rank, float v) {
  u32 at;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0],%1;" :: "r"(at), "f"(v) : "memory");
}

// -- lanes ----------------------------------------------------------------------------------------

DEVICE float lane_xor(float v, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, v, mask); }
DEVICE u32 lane_xor(u32 v, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, v, mask); }
DEVICE int lane_xor(int v, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, v, mask); }
DEVICE u64 lane_xor(u64 v, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, v, mask); }
DEVICE u64 lane_up(u64 v, int by) { return __shfl_up_sync(0xFFFFFFFFu, v, by); }
DEVICE int lane_up(int v, int by) { return __shfl_up_sync(0xFFFFFFFFu, v, by); }
DEVICE int lane_of(int v, int lane) { return __shfl_sync(0xFFFFFFFFu, v, lane); }
DEVICE u32 lane_vote(bool v) { return __ballot_sync(0xFFFFFFFFu, v); }
DEVICE u32 lanes_with(int v) { return __match_any_sync(0xFFFFFFFFu, v); }
DEVICE u32 lane_max(u32 v) { return __reduce_max_sync(0xFFFFFFFFu, v); }
DEVICE u32 lane_min(u32 v) { return __reduce_min_sync(0xFFFFFFFFu, v); }
DEVICE int count_bits(u32 v) { return __popc(v); }

// -- numbers --------------------------------------------------------------------------------------

DEVICE float as_float(u32 v) { return __uint_as_float(v); }
DEVICE u32 as_bits(float v) { return __float_as_uint(v); }
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float exp_(float x) { return __expf(x); }
DEVICE float log_(float x) { return logf(x); }
DEVICE float sqrt_(float x) { return sqrtf(x); }
DEVICE float rsqrt_(float x) { return rsqrtf(x); }
// 1 / x within one unit of the last place, in one instruction.
DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float infinity() { return __int_as_float(0x7F800000); }
DEVICE float nan_() { return __int_as_float(0x7FFFFFFF); }
DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
DEVICE float minimum(float a, float b) { return fminf(a, b); }
DEVICE u32 multiply_high(u32 a, u32 b) { return __umulhi(a, b); }

DEVICE u32 mul_f16x2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 pack_f16x2(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
DEVICE u32 pack_bf16x2(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
DEVICE float f16_to_float(u16 v) {
  float d;
  asm("cvt.f32.f16 %0,%1;" : "=f"(d) : "h"(v));
  return d;
}
DEVICE u32 e4m3x2_to_f16x2(u16 v) {
  u32 d;
  asm("cvt.rn.f16x2.e4m3x2 %0,%1;" : "=r"(d) : "h"(v));
  return d;
}
DEVICE u16 pack_e4m3x2(float low, float high) {
  u16 d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}
// Bytes of {a (0..3), b (4..7)} chosen by the nibbles of `selector`.
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// -- matrix products: d [16, 8] += a [16, 16] b [16, 8], fp32 -----------------------------------------

DEVICE void mma_f16(float* d, const u32* a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_bf16(float* d, const u32* a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four 8 x 8 matrices of 16-bit elements; lane i names row i % 8 of matrix i / 8.
DEVICE void load_matrices(u32* r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
DEVICE void load_matrices_transposed(u32* r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// -- matrix products of four warps (sm_90 alone): d [64, n] += a [64, 32] b [n, 32]^T of e4m3 ---------
// Both operands lie in shared memory, see swizzled_rows; a warp has 16 rows of d, laid out as in mma_f16.

// What this thread wrote to shared memory is there for the matrix unit (then meet the others).
DEVICE void fence_matrix_memory() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void warps_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void warps_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void warps_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Says to the compiler that a result is there from here on, and not before.
DEVICE void arrived(float& v) { asm volatile("" : "+f"(v) :: "memory"); }
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
template <int COLUMNS> DEVICE void warps_mma_e4m3(float* d, u64 a, u64 b, bool add) {
  if constexpr (COLUMNS == 8)
    asm volatile("{.reg .pred p; setp.ne.b32 p,%6,0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3},%4,%5,p,1,1;}"
                 : D4(0) : "l"(a), "l"(b), "r"((int)add));
  else if constexpr (COLUMNS == 16)
    asm volatile("{.reg .pred p; setp.ne.b32 p,%10,0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7},"
                 "%8,%9,p,1,1;}"
                 : D4(0), D4(4) : "l"(a), "l"(b), "r"((int)add));
  else if constexpr (COLUMNS == 32)
    asm volatile("{.reg .pred p; setp.ne.b32 p,%18,0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7,"
                 "%8,%9,%10,%11,%12,%13,%14,%15},%16,%17,p,1,1;}"
                 : D16(0) : "l"(a), "l"(b), "r"((int)add));
  else
    asm volatile("{.reg .pred p; setp.ne.b32 p,%34,0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7,"
                 "%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
                 "%28,%29,%30,%31},%32,%33,p,1,1;}"
                 : D16(0), D16(16) : "l"(a), "l"(b), "r"((int)add));
}
#undef D16
#undef D4

#endif

// Rows of 128 bytes, 16 bytes at a time, in groups of eight rows (1024 bytes, the tile's alignment):
// chunk c of row r lies where the matrix unit's 128-byte swizzle looks for it.
DEVICE int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
// What the matrix unit wants to know of such a tile; `at` may be up to 96 bytes inside its first row.
DEVICE u64 swizzled_rows(const void* at) {
  return (u64)((shared_address(at) & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Waits until at most `left` of a thread's groups of copies are on their way (a constant once unrolled).
DEVICE void copies_wait_for(int left) {
  if (left <= 0) copies_wait<0>();
  else if (left == 1) copies_wait<1>();
  else if (left == 2) copies_wait<2>();
  else if (left == 3) copies_wait<3>();
  else if (left == 4) copies_wait<4>();
  else if (left == 5) copies_wait<5>();
  else if (left == 6) copies_wait<6>();
  else copies_wait<7>();
}

DEVICE float bf16_low(u32 pair) { return as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return as_float(pair & 0xFFFF0000u); }
DEVICE int min_(int a, int b) { return a < b ? a : b; }
DEVICE int max_(int a, int b) { return a > b ? a : b; }

// Element types by number, as the Python side names them: 0 fp32, 1 bf16, 2 fp16.
template <int TYPE> struct Element;
template <> struct Element<0> {
  static constexpr int BYTES = 4;
  DEVICE static void unpack(Vec4 v, float* f) {
    f[0] = as_float(v.x), f[1] = as_float(v.y), f[2] = as_float(v.z), f[3] = as_float(v.w);
  }
  DEVICE static void store(void* base, i64 i, float f) { ((float*)base)[i] = f; }
  DEVICE static void store4(void* base, i64 i, const float* f) {
    store16((float*)base + i, {as_bits(f[0]), as_bits(f[1]), as_bits(f[2]), as_bits(f[3])});
  }
  DEVICE static float load(const void* base, i64 i) { return ((const float*)base)[i]; }
};
template <> struct Element<1> {
  static constexpr int BYTES = 2;
  DEVICE static void unpack(Vec4 v, float* f) {
    f[0] = bf16_low(v.x), f[1] = bf16_high(v.x), f[2] = bf16_low(v.y), f[3] = bf16_high(v.y);
    f[4] = bf16_low(v.z), f[5] = bf16_high(v.z), f[6] = bf16_low(v.w), f[7] = bf16_high(v.w);
  }
  DEVICE static void store(void* base, i64 i, float f) { ((u16*)base)[i] = (u16)pack_bf16x2(f, f); }
  DEVICE static void store4(void* base, i64 i, const float* f) {
    *(Vec2*)((u16*)base + i) = {pack_bf16x2(f[0], f[1]), pack_bf16x2(f[2], f[3])};
  }
  DEVICE static float load(const void* base, i64 i) { return as_float((u32)((const u16*)base)[i] << 16); }
};
template <> struct Element<2> {
  static constexpr int BYTES = 2;
  DEVICE static void unpack(Vec4 v, float* f) {
    f[0] = f16_to_float((u16)v.x), f[1] = f16_to_float((u16)(v.x >> 16));
    f[2] = f16_to_float((u16)v.y), f[3] = f16_to_float((u16)(v.y >> 16));
    f[4] = f16_to_float((u16)v.z), f[5] = f16_to_float((u16)(v.z >> 16));
    f[6] = f16_to_float((u16)v.w), f[7] = f16_to_float((u16)(v.w >> 16));
  }
  DEVICE static void store(void* base, i64 i, float f) { ((u16*)base)[i] = (u16)pack_f16x2(f, f); }
  DEVICE static void store4(void* base, i64 i, const float* f) {
    *(Vec2*)((u16*)base + i) = {pack_f16x2(f[0], f[1]), pack_f16x2(f[2], f[3])};
  }
  DEVICE static float load(const void* base, i64 i) { return f16_to_float(((const u16*)base)[i]); }
};
