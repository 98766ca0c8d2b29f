// FP8 block-scaled linear for few tokens, and the grouped output projection: see
// kernels/fp8_linear.py and kernels/wo_a.py for the arithmetic.
//
// A block takes 64 weight rows and KB scale blocks of 128 channels: all its weights are on their way
// before it looks at the tokens. The SPLITS blocks of a cluster cover K and add up through each
// other's shared memory, in rank order. Weight rows are the rows of the matrix instruction.
//
// Build with MODE (0: quantise x; 1: x holds e4m3 codes with factors; 2: x in fp16 after the inverse
// rotation of every head's last 64 channels, one matrix per group of 8 heads), KB, SPLITS, TOKENS
// (8, 16, 32, 64), IN, OUT.
#include "device.cuh"

constexpr int ROWS = 64, BLOCK = 128, SHARE = KB * BLOCK, THREADS = 256;
constexpr int TOKEN_GROUPS = TOKENS >= 32 ? 2 : 1, K_GROUPS = 2 / TOKEN_GROUPS;
constexpr int TILES = TOKENS / 8 / TOKEN_GROUPS;  // of 8 tokens a warp
constexpr int W_STRIDE = SHARE + 64, X_STRIDE = SHARE * 2 + 16, RED_STRIDE = ROWS + 4;  // B, B, floats
constexpr int X_AT = ROWS * W_STRIDE, FACTORS_AT = X_AT + TOKENS * X_STRIDE;
constexpr int HALVES = MODE != 1 && IN == 0 ? 2 : 1;  // loads of 16 bytes for eight values of x
constexpr int ITEMS = TOKENS * KB * 16 / THREADS, BATCH = ITEMS < 4 ? ITEMS : 4;
static_assert(KB % K_GROUPS == 0 && ITEMS % BATCH == 0, "shares of K");
static_assert(K_GROUPS * TOKENS * RED_STRIDE * 4 <= FACTORS_AT, "sums take the place of the operands");

KERNEL(THREADS, 2)
linear_kernel(const u8* x, const float* given_factors, const u8* weight, const u8* scale,
              const float* rope, void* out, int tokens, i64 x_stride, int n, int k, int group_rows) {
  SHARED_BYTES(shared);
  let_next_start();
  const int thread = thread_id(), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int split = block_x(), first_row = block_y() * ROWS, first_token = block_z() * TOKENS;
  UNROLL for (int b = 0; b < KB; b++) {
    UNROLL for (int i = 0; i < ROWS * BLOCK / 16 / THREADS; i++) {
      const int c = i * THREADS + thread, row = c / (BLOCK / 16), at = b * BLOCK + c % (BLOCK / 16) * 16;
      copy16_async(shared + row * W_STRIDE + at, weight + (i64)(first_row + row) * k + split * SHARE + at);
    }
    copies_commit();
  }
  float w_factor[KB];
  UNROLL for (int b = 0; b < KB; b++)
    w_factor[b] = as_float((u32)scale[(i64)(first_row / BLOCK) * (k / BLOCK) + split * KB + b] << 23);
  await_previous();  // weights do not depend on it, tokens do

  // Tokens as fp16: half a warp takes 128 channels of one token; all loads of a batch come first.
  float* factors = (float*)(shared + FACTORS_AT);
  const i64 column = (i64)split * SHARE + (MODE == 2 ? (i64)(first_row / group_rows) * k : 0);
  const int at = thread % 16 * 8;
  UNROLL for (int start = 0; start < ITEMS; start += BATCH) {
    Vec4 raw[BATCH][HALVES], angles[BATCH][2];
    UNROLL for (int j = 0; j < BATCH; j++) {
      const int i = (start + j) * (THREADS / 16) + thread / 16, token = i / KB, block = i % KB;
      const bool live = first_token + token < tokens;
      const i64 from = (i64)(first_token + token) * x_stride + column + block * BLOCK + at;
      UNROLL for (int h = 0; h < HALVES; h++) raw[j][h] = {0, 0, 0, 0};
      if (MODE == 1) {
        if (live) {
          const Vec2 codes = *(const Vec2*)(x + from);
          raw[j][0] = {codes.x, codes.y, as_bits(given_factors[(i64)(split * KB + block) * tokens +
                                                              first_token + token]), 0};
        }
        continue;
      }
      if (live) {
        UNROLL for (int h = 0; h < HALVES; h++) raw[j][h] = load16(x + from * Element<IN>::BYTES + h * 16);
      }
      if (MODE == 2) {
        const int channel = ((int)column + block * BLOCK + at) % 512;
        angles[j][0] = {as_bits(1.0f), as_bits(1.0f), as_bits(1.0f), as_bits(1.0f)};
        angles[j][1] = {0, 0, 0, 0};
        if (channel >= 448 && live) {
          const float* angle = rope + (i64)(first_token + token) * 64 + (channel - 448) / 2;
          angles[j][0] = load16(angle), angles[j][1] = load16(angle + 32);
        }
      }
    }
    float v[BATCH][8], most[BATCH];
    UNROLL for (int j = 0; j < BATCH; j++) {
      most[j] = 0.0f;
      if (MODE == 1) continue;
      UNROLL for (int h = 0; h < HALVES; h++) Element<IN>::unpack(raw[j][h], v[j] + h * 4);
      UNROLL for (int c = 0; c < 8; c++) most[j] = maximum(most[j], v[j][c] < 0.0f ? -v[j][c] : v[j][c]);
    }
    if (MODE == 0) {
      UNROLL for (int mask = 8; mask; mask /= 2) {
        UNROLL for (int j = 0; j < BATCH; j++) most[j] = maximum(most[j], lane_xor(most[j], mask));
      }
    }
    UNROLL for (int j = 0; j < BATCH; j++) {
      const int i = (start + j) * (THREADS / 16) + thread / 16, token = i / KB, block = i % KB;
      u32 halves[4];
      float factor = 1.0f;
      if (MODE == 1) {
        halves[0] = e4m3x2_to_f16x2((u16)raw[j][0].x), halves[1] = e4m3x2_to_f16x2((u16)(raw[j][0].x >> 16));
        halves[2] = e4m3x2_to_f16x2((u16)raw[j][0].y), halves[3] = e4m3x2_to_f16x2((u16)(raw[j][0].y >> 16));
        factor = as_float(raw[j][0].z);
      } else if (MODE == 0) {
        const u32 exponent = (as_bits(maximum(most[j], 1e-4f) * (1.0f / 448.0f)) + 0x7FFFFFu) >> 23;
        const float inverse = as_float((254u - exponent) << 23);
        factor = as_float(exponent << 23);
        UNROLL for (int c = 0; c < 4; c++)
          halves[c] = e4m3x2_to_f16x2(pack_e4m3x2(v[j][2 * c] * inverse, v[j][2 * c + 1] * inverse));
      } else {
        float cos[4], sin[4];
        Element<0>::unpack(angles[j][0], cos), Element<0>::unpack(angles[j][1], sin);
        UNROLL for (int c = 0; c < 4; c++) {
          const float even = v[j][2 * c], odd = v[j][2 * c + 1];
          halves[c] = pack_f16x2(even * cos[c] + odd * sin[c], odd * cos[c] - even * sin[c]);
        }
      }
      *(Vec4*)(shared + X_AT + token * X_STRIDE + (block * BLOCK + at) * 2) = {halves[0], halves[1], halves[2], halves[3]};
      if (thread % 16 == 0) factors[block * TOKENS + token] = factor;
    }
  }

  const int row = warp % 4 * 16 + g, half = warp / 4;
  const int token_base = TOKEN_GROUPS == 2 ? half * (TOKENS / 2) : 0;
  float acc[TILES][4];
  UNROLL for (int i = 0; i < TILES; i++) {
    UNROLL for (int j = 0; j < 4; j++) acc[i][j] = 0.0f;
  }
  UNROLL for (int b = 0; b < KB; b++) {
    if (b == 0) copies_wait<KB - 1>();
    else if (b == 1) copies_wait<(KB > 1 ? KB - 2 : 0)>();
    else if (b == 2) copies_wait<(KB > 2 ? KB - 3 : 0)>();
    else copies_wait<0>();
    if (b < 4) sync_block();
    if (K_GROUPS == 2 && b % 2 != half) continue;
    float product[TILES][4];
    UNROLL for (int i = 0; i < TILES; i++) {
      UNROLL for (int j = 0; j < 4; j++) product[i][j] = 0.0f;
    }
    UNROLL for (int part = 0; part < 2; part++) {  // 16 channels of a row a lane and part
      const int at = b * BLOCK + part * 64 + t * 16;
      const Vec4 wa = *(const Vec4*)(shared + row * W_STRIDE + at);
      const Vec4 wb = *(const Vec4*)(shared + (row + 8) * W_STRIDE + at);
      const u32 code_a[4] = {wa.x, wa.y, wa.z, wa.w}, code_b[4] = {wb.x, wb.y, wb.z, wb.w};
      UNROLL for (int pair = 0; pair < 2; pair++) {
        u32 a[2][4];
        UNROLL for (int s = 0; s < 2; s++) {
          const u32 ca = code_a[pair * 2 + s], cb = code_b[pair * 2 + s];
          a[s][0] = e4m3x2_to_f16x2((u16)ca), a[s][1] = e4m3x2_to_f16x2((u16)cb);
          a[s][2] = e4m3x2_to_f16x2((u16)(ca >> 16)), a[s][3] = e4m3x2_to_f16x2((u16)(cb >> 16));
        }
        UNROLL for (int i = 0; i < TILES; i++) {
          const Vec4 v = *(const Vec4*)(shared + X_AT + (token_base + i * 8 + g) * X_STRIDE + (at + pair * 8) * 2);
          mma_f16(product[i], a[0], v.x, v.y);
          mma_f16(product[i], a[1], v.z, v.w);
        }
      }
    }
    UNROLL for (int i = 0; i < TILES; i++) {
      const float* f = factors + b * TOKENS + token_base + i * 8 + t * 2;
      const float f0 = f[0] * w_factor[b], f1 = f[1] * w_factor[b];
      acc[i][0] += product[i][0] * f0, acc[i][1] += product[i][1] * f1;
      acc[i][2] += product[i][2] * f0, acc[i][3] += product[i][3] * f1;
    }
  }
  sync_block();
  float* sums = (float*)shared;  // [share of K in the block][token][row]
  UNROLL for (int i = 0; i < TILES; i++) {
    UNROLL for (int j = 0; j < 4; j++) {
      const int token = token_base + i * 8 + t * 2 + j % 2 + (K_GROUPS == 2 ? half * TOKENS : 0);
      sums[token * RED_STRIDE + row + j / 2 * 8] = acc[i][j];
    }
  }
  if (SPLITS > 1) sync_cluster();
  else sync_block();
  constexpr int QUADS = ROWS / 4;  // four rows a thread; the ranks share them
  for (int i = thread * SPLITS + split; i < TOKENS * QUADS; i += THREADS * SPLITS) {
    const int token = i / QUADS, at = i % QUADS * 4;
    if (first_token + token >= tokens) continue;
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    UNROLL for (int s = 0; s < SPLITS; s++) {
      UNROLL for (int h = 0; h < K_GROUPS; h++) {
        float v[4];
        const float* from = sums + (h * TOKENS + token) * RED_STRIDE + at;
        if (SPLITS > 1) {
          peer_load4(from, s, v);
        } else {
          UNROLL for (int j = 0; j < 4; j++) v[j] = from[j];
        }
        UNROLL for (int j = 0; j < 4; j++) total[j] += v[j];
      }
    }
    Element<OUT>::store4(out, (i64)(first_token + token) * n + first_row + at, total);
  }
  if (SPLITS > 1) sync_cluster();  // no block ends while another reads its memory
}
HOST_ENTRY(linear_kernel)
