#include <stdint.h>
#include <string.h>
typedef int32_t vi __attribute__((vector_size(64))); // 16 whole numbers
typedef float hf __attribute__((vector_size(32)));   // 8 floats: half of them, so that they fit as doubles
typedef double vd __attribute__((vector_size(64)));  // 8 doubles

// One stretch of a row. A float32 is  s eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm : the upper half alone is a bf16.
// Without its sign the bits of a larger number are a larger integer, and 0x7f800000 and above are not finite.
// sums: 0 sum, 1 squares, 2 largest magnitude, 3 whether a lower half was in use, 4 zeros
static double part(const uint32_t *x, int64_t n, double *sums) {
  vd sum0 = {0}, sum1 = {0}, square0 = {0}, square1 = {0};
  vi most = {0}, low = {0}, zeros = {0};
  double squares = 0;
  for (int64_t k = 0; k < n; k += 16) {
    vi v;
    if (k + 16 <= n) {
      memcpy(&v, x + k, 64);
    } else { // the rest is filled up with zeros, which are not counted
      uint32_t rest[16] = {0};
      memcpy(rest, x + k, 4 * (n - k));
      memcpy(&v, rest, 64);
      sums[4] -= 16 - (n - k);
    }
    vi size = v & 0x7fffffff;
    vi bad = size >= 0x7f800000; // a comparison gives -1 or 0 in every place
    low |= v & 0xffff;
    zeros -= size == 0;
    size &= ~bad;
    v &= ~bad;
    vi larger = size > most;
    most = (size & larger) | (most & ~larger);
    hf first, second;
    memcpy(&first, &v, 32);
    memcpy(&second, (char *)&v + 32, 32);
    vd d = __builtin_convertvector(first, vd), e = __builtin_convertvector(second, vd);
    sum0 += d;
    sum1 += e;
    square0 += d * d;
    square1 += e * e;
  }
  for (int j = 0; j < 8; j++) {
    sums[0] += sum0[j] + sum1[j];
    squares += square0[j] + square1[j];
  }
  for (int j = 0; j < 16; j++) {
    float size;
    int32_t bits = most[j];
    memcpy(&size, &bits, 4);
    if (size > sums[2]) sums[2] = size;
    if (low[j]) sums[3] = 1;
    sums[4] += zeros[j];
  }
  sums[1] += squares;
  return squares;
}

// Blocks of 4096 values, which stay in the first cache: widened if they are bf16, then cut where rows end.
// Four histograms in turn, because a count that waits for the one before it is slow.
void piece_sums(const char *data, int half, int64_t n, int64_t cols, double *sums, int64_t *hist,
                uint8_t *seen, double *rows) {
  uint32_t wide[4096], counts[4][256];
  memset(counts, 0, sizeof counts);
  for (int64_t a = 0; a < n; a += 4096) {
    int64_t m = n - a < 4096 ? n - a : 4096;
    const uint32_t *x = (const uint32_t *)(data + 4 * a);
    if (half) {
      for (int64_t k = 0; k < m; k++) {
        uint16_t upper;
        memcpy(&upper, data + 2 * (a + k), 2);
        wide[k] = (uint32_t)upper << 16;
      }
      x = wide;
    }
    for (int64_t k = 0; k < m;) {
      int64_t row = (a + k) / cols, end = (row + 1) * cols - a;
      if (end > m) end = m;
      rows[row] += part(x + k, end - k, sums);
      k = end;
    }
    int64_t k = 0;
    for (; k + 4 <= m; k += 4)
      for (int j = 0; j < 4; j++) counts[j][(x[k + j] >> 23) & 255]++;
    for (; k < m; k++) counts[0][(x[k] >> 23) & 255]++;
    if (seen)
      for (k = 0; k < m; k++) seen[x[k] >> 16] = 1;
  }
  for (int j = 0; j < 256; j++) hist[j] += (int64_t)counts[0][j] + counts[1][j] + counts[2][j] + counts[3][j];
}
