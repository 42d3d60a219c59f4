/* A convolution as a plain C library, checked against a plain loop:

     im2win build papers12 --layers conv9 --batch 1 --c-abi --out build
     cc -O2 -Ibuild layer.c -Lbuild -lconv9 -Wl,-rpath,build -lm -o build/layer && build/layer

   With build/libconv9.a -lm -lpthread in place of -Lbuild -lconv9 the program stands alone. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "conv9.h"

#define OF(name) IM2WIN_CONV_CONV9_##name

/* Output (k, m, n) of the first image, straight from the formula. */
static double plain(const float *x, const float *w, int k, int m, int n) {
  double sum = 0;
  for (int c = 0; c < OF(IN_CHANNELS); c++)
    for (int u = 0; u < OF(KERNEL_HEIGHT); u++)
      for (int v = 0; v < OF(KERNEL_WIDTH); v++) {
        int row = m * OF(STRIDE_DOWN) + u - OF(PADDING_TOP), column = n * OF(STRIDE_ACROSS) + v - OF(PADDING_LEFT);
        if (row < 0 || row >= OF(HEIGHT) || column < 0 || column >= OF(WIDTH)) continue;
        sum += (double)x[(c * OF(HEIGHT) + row) * OF(WIDTH) + column] *
               w[((k * OF(IN_CHANNELS) + c) * OF(KERNEL_HEIGHT) + u) * OF(KERNEL_WIDTH) + v];
      }
  return sum;
}

static float *floats(size_t count) {
  float *values = malloc(count * sizeof *values);
  if (values == NULL) exit(2);
  for (size_t i = 0; i < count; i++) values[i] = sinf((float)i);
  return values;
}

int main(void) {
  float *x = floats(OF(INPUT_ELEMENTS)), *w = floats(OF(FILTER_ELEMENTS)), *y = floats(OF(OUTPUT_ELEMENTS));
  float *packed = floats(OF(PACKED_ELEMENTS));
  void *workspace = malloc(OF(WORKSPACE_BYTES) + 1);

  int status = im2win_conv_conv9_pack(w, packed); /* once */
  if (status == IM2WIN_OK) status = im2win_set_threads(2);
  if (status == IM2WIN_OK) status = im2win_conv_conv9(x, packed, y, workspace);
  if (status != IM2WIN_OK) {
    fprintf(stderr, "im2win status %d\n", status);
    return 1;
  }

  long wrong = 0;
  for (int k = 0; k < OF(OUT_CHANNELS); k++)
    for (int m = 0; m < OF(OUT_HEIGHT); m++)
      for (int n = 0; n < OF(OUT_WIDTH); n++) {
        double right = plain(x, w, k, m, n);
        wrong += !(fabs(y[(k * OF(OUT_HEIGHT) + m) * OF(OUT_WIDTH) + n] - right) < 1e-3); /* NaN is wrong, too */
      }
  printf("%s: %d outputs, %ld wrong\n", OF(KEY), OF(OUTPUT_ELEMENTS) / OF(BATCH), wrong);
  return wrong != 0;
}
