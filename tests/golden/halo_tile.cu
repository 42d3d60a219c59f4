extern "C" __global__ void __launch_bounds__(128) conv2d_kernel(float* __restrict__ data_ptr, float* __restrict__ filter_ptr, float* __restrict__ output_ptr);
extern "C" __global__ void __launch_bounds__(128) conv2d_kernel(float* __restrict__ data_ptr, float* __restrict__ filter_ptr, float* __restrict__ output_ptr) {
  extern __shared__ __align__(128) float shared_ptr[];
  int cse_v1 = (((int)blockIdx.x) & 1);
  int cse_v15 = ((((int)blockIdx.x) >> 1) * 7168);
  int cse_v16 = ((((int)blockIdx.x) & 1) * 896);
  for (int v = 0; v < 2; ++v) {
    int cse_v14 = ((v * 128) + ((int)threadIdx.x));
    if (((v * 128) + ((int)threadIdx.x)) < 192) {
      int cse_v29 = (((v * 128) + ((int)threadIdx.x)) / 48);
      int cse_v30 = (((v * 128) + ((int)threadIdx.x)) % 3);
      int cse_v33 = ((((v * 128) + ((int)threadIdx.x)) % 48) / 3);
      int cse_v38 = (((((((int)blockIdx.x) % 14) >> 1) * 4) + (((v * 128) + ((int)threadIdx.x)) / 48)) + (((v * 128) + ((int)threadIdx.x)) % 3));
      int cse_v39 = (((((int)blockIdx.x) & 1) * 14) + ((((v * 128) + ((int)threadIdx.x)) % 48) / 3));
      ((int*)shared_ptr)[(((v * 128) + ((int)threadIdx.x)) + 8192)] = (((((1 <= (((((((int)blockIdx.x) % 14) >> 1) * 4) + (((v * 128) + ((int)threadIdx.x)) / 48)) + (((v * 128) + ((int)threadIdx.x)) % 3))) && ((((((((int)blockIdx.x) % 14) >> 1) * 4) + (((v * 128) + ((int)threadIdx.x)) / 48)) + (((v * 128) + ((int)threadIdx.x)) % 3)) < 29)) && (1 <= (((((int)blockIdx.x) & 1) * 14) + ((((v * 128) + ((int)threadIdx.x)) % 48) / 3)))) && ((((((int)blockIdx.x) & 1) * 14) + ((((v * 128) + ((int)threadIdx.x)) % 48) / 3)) < 29)) ? (((((((((int)blockIdx.x) >> 1) * 7168) + ((((v * 128) + ((int)threadIdx.x)) / 48) * 1792)) + ((((v * 128) + ((int)threadIdx.x)) % 3) * 1792)) + ((((int)blockIdx.x) & 1) * 896)) + (((((v * 128) + ((int)threadIdx.x)) % 48) / 3) * 64)) - 1856) : -1);
    }
  }
  __syncthreads();
  alignas(64) float sums_ptr[32];
  alignas(64) uint a_word_ptr[8];
  alignas(64) uint b_word_ptr[16];
  alignas(64) int first_ptr[4];
  int cse_v2 = (((int)threadIdx.x) >> 6);
  int cse_v3 = (((int)threadIdx.x) & 31);
  int cse_v17 = ((((int)threadIdx.x) >> 6) * 32);
  #pragma unroll
  for (int v_1 = 0; v_1 < 4; ++v_1) {
    int cse_v40 = min(((((((int)threadIdx.x) >> 6) * 32) + (v_1 * 8)) + ((((int)threadIdx.x) & 31) >> 2)), 55);
    first_ptr[v_1] = (((min(((((((int)threadIdx.x) >> 6) * 32) + (v_1 * 8)) + ((((int)threadIdx.x) & 31) >> 2)), 55) / 14) * 768) + ((min(((((((int)threadIdx.x) >> 6) * 32) + (v_1 * 8)) + ((((int)threadIdx.x) & 31) >> 2)), 55) % 14) * 48));
  }
  #pragma unroll
  for (int v_2 = 0; v_2 < 2; ++v_2) {
    #pragma unroll
    for (int v_3 = 0; v_3 < 4; ++v_3) {
      #pragma unroll
      for (int v_4 = 0; v_4 < 4; ++v_4) {
        sums_ptr[(((v_2 * 16) + (v_3 * 4)) + v_4)] = 0x0p+0f/*0.000000e+00*/;
      }
    }
  }
  int cse_v4 = (((int)threadIdx.x) * 4);
  im2win::copy_async<16>((&(shared_ptr[(((int)threadIdx.x) * 4)])), (&(filter_ptr[(((int)threadIdx.x) * 4)])));
  int cse_v18 = ((((int)threadIdx.x) * 4) + 512);
  im2win::copy_async<16>((&(shared_ptr[((((int)threadIdx.x) * 4) + 512)])), (&(filter_ptr[((((int)threadIdx.x) * 4) + 512)])));
  int cse_v5 = (((int)threadIdx.x) & 3);
  int cse_v6 = (((int)threadIdx.x) >> 2);
  int cse_v19 = ((((int)threadIdx.x) & 3) * 4);
  int cse_v20 = ((((int)threadIdx.x) >> 2) + 8192);
  im2win::copy_async<16>((&(shared_ptr[((((int)threadIdx.x) * 4) + 2048)])), (&(data_ptr[(((((int)threadIdx.x) & 3) * 4) + ((int*)shared_ptr)[((((int)threadIdx.x) >> 2) + 8192)])])), (0 <= ((int*)shared_ptr)[((((int)threadIdx.x) >> 2) + 8192)]));
  int cse_v21 = ((((int)threadIdx.x) >> 2) + 8224);
  im2win::copy_async<16>((&(shared_ptr[((((int)threadIdx.x) * 4) + 2560)])), (&(data_ptr[(((((int)threadIdx.x) & 3) * 4) + ((int*)shared_ptr)[((((int)threadIdx.x) >> 2) + 8224)])])), (0 <= ((int*)shared_ptr)[((((int)threadIdx.x) >> 2) + 8224)]));
  int cse_v22 = ((((int)threadIdx.x) >> 2) + 8256);
  im2win::copy_async<16>((&(shared_ptr[((((int)threadIdx.x) * 4) + 3072)])), (&(data_ptr[(((((int)threadIdx.x) & 3) * 4) + ((int*)shared_ptr)[((((int)threadIdx.x) >> 2) + 8256)])])), (0 <= ((int*)shared_ptr)[((((int)threadIdx.x) >> 2) + 8256)]));
  int cse_v23 = ((((int)threadIdx.x) >> 2) + 8288);
  im2win::copy_async<16>((&(shared_ptr[((((int)threadIdx.x) * 4) + 3584)])), (&(data_ptr[(((((int)threadIdx.x) & 3) * 4) + ((int*)shared_ptr)[((((int)threadIdx.x) >> 2) + 8288)])])), (0 <= ((int*)shared_ptr)[((((int)threadIdx.x) >> 2) + 8288)]));
  int cse_v24 = ((((int)threadIdx.x) >> 2) + 8320);
  im2win::copy_async<16>((&(shared_ptr[((((int)threadIdx.x) * 4) + 4096)])), (&(data_ptr[(((((int)threadIdx.x) & 3) * 4) + ((int*)shared_ptr)[((((int)threadIdx.x) >> 2) + 8320)])])), (0 <= ((int*)shared_ptr)[((((int)threadIdx.x) >> 2) + 8320)]));
  int cse_v25 = ((((int)threadIdx.x) >> 2) + 8352);
  im2win::copy_async<16>((&(shared_ptr[((((int)threadIdx.x) * 4) + 4608)])), (&(data_ptr[(((((int)threadIdx.x) & 3) * 4) + ((int*)shared_ptr)[((((int)threadIdx.x) >> 2) + 8352)])])), (0 <= ((int*)shared_ptr)[((((int)threadIdx.x) >> 2) + 8352)]));
  im2win::commit_copies();
  int cse_v10 = (((int)threadIdx.x) & 63);
  for (int v_5 = 0; v_5 < 36; ++v_5) {
    im2win::wait_copies<0>();
    __syncthreads();
    if (v_5 < 35) {
      int cse_v26 = ((v_5 * 1024) + (((int)threadIdx.x) * 4));
      int cse_v34 = ((((v_5 + 1) & 1) * 1024) + (((int)threadIdx.x) * 4));
      im2win::copy_async<16>((&(shared_ptr[((((v_5 + 1) & 1) * 1024) + (((int)threadIdx.x) * 4))])), (&(filter_ptr[(((v_5 * 1024) + (((int)threadIdx.x) * 4)) + 1024)])));
      im2win::copy_async<16>((&(shared_ptr[(((((v_5 + 1) & 1) * 1024) + (((int)threadIdx.x) * 4)) + 512)])), (&(filter_ptr[(((v_5 * 1024) + (((int)threadIdx.x) * 4)) + 1536)])));
    }
    int cse_v7 = (v_5 % 9);
    if (v_5 < 27) {
      if ((v_5 % 9) < 6) {
        int cse_v8 = (v_5 / 9);
        int cse_v35 = ((((v_5 % 9) * 32) + (((int)threadIdx.x) >> 2)) + 8192);
        im2win::copy_async<16>((&(shared_ptr[(((((((v_5 / 9) + 1) & 1) * 3072) + ((v_5 % 9) * 512)) + (((int)threadIdx.x) * 4)) + 2048)])), (&(data_ptr[(((((v_5 / 9) * 16) + ((((int)threadIdx.x) & 3) * 4)) + ((int*)shared_ptr)[((((v_5 % 9) * 32) + (((int)threadIdx.x) >> 2)) + 8192)]) + 16)])), (0 <= ((int*)shared_ptr)[((((v_5 % 9) * 32) + (((int)threadIdx.x) >> 2)) + 8192)]));
      }
    }
    im2win::commit_copies();
    #pragma unroll
    for (int v_6 = 0; v_6 < 4; ++v_6) {
      int cse_v9 = (v_6 * 4);
      im2win::load_words((&(b_word_ptr[(v_6 * 4)])), (&(shared_ptr[((((((((v_5 % 18) / 9) * 3072) + ((v_5 % 3) * 48)) + (((v_5 % 9) / 3) * 16)) + ((((int)threadIdx.x) & 3) * 4)) + first_ptr[v_6]) + 2048)])));
      #pragma unroll
      for (int v_7 = 0; v_7 < 4; ++v_7) {
        int cse_v27 = ((v_6 * 4) + v_7);
        b_word_ptr[((v_6 * 4) + v_7)] = im2win::rounded_tf32(b_word_ptr[((v_6 * 4) + v_7)]);
      }
    }
    int cse_v28 = ((((int)threadIdx.x) & 31) * 4);
    int cse_v36 = (((v_5 & 1) * 1024) + (((((int)threadIdx.x) & 63) >> 5) * 512));
    #pragma unroll
    for (int v_8 = 0; v_8 < 2; ++v_8) {
      im2win::load_words((&(a_word_ptr[(v_8 * 4)])), (&(shared_ptr[(((((v_5 & 1) * 1024) + (((((int)threadIdx.x) & 63) >> 5) * 512)) + (v_8 * 256)) + ((((int)threadIdx.x) & 31) * 4))])));
    }
    #pragma unroll
    for (int v_9 = 0; v_9 < 2; ++v_9) {
      #pragma unroll
      for (int v_10 = 0; v_10 < 4; ++v_10) {
        int cse_v11 = (v_10 * 4);
        im2win::product_tf32((&(sums_ptr[((v_9 * 16) + (v_10 * 4))])), (&(a_word_ptr[(v_9 * 4)])), (&(b_word_ptr[(v_10 * 4)])));
      }
    }
    #pragma unroll
    for (int v_11 = 0; v_11 < 2; ++v_11) {
      im2win::load_words((&(a_word_ptr[(v_11 * 4)])), (&(shared_ptr[((((((v_5 & 1) * 1024) + (((((int)threadIdx.x) & 63) >> 5) * 512)) + (v_11 * 256)) + ((((int)threadIdx.x) & 31) * 4)) + 128)])));
    }
    #pragma unroll
    for (int v_12 = 0; v_12 < 2; ++v_12) {
      #pragma unroll
      for (int v_13 = 0; v_13 < 4; ++v_13) {
        int cse_v12 = (v_13 * 4);
        im2win::product_tf32((&(sums_ptr[((v_12 * 16) + (v_13 * 4))])), (&(a_word_ptr[(v_12 * 4)])), (&(b_word_ptr[((v_13 * 4) + 2)])));
      }
    }
  }
  alignas(64) float values_ptr[4];
  #pragma unroll
  for (int v_14 = 0; v_14 < 4; ++v_14) {
    int cse_v13 = (v_14 * 4);
    int cse_v31 = (((((int)threadIdx.x) >> 6) * 32) + (v_14 * 8));
    int cse_v32 = (((((int)threadIdx.x) & 63) >> 2) * 4);
    int cse_v37 = ((((((int)threadIdx.x) >> 6) * 32) + (v_14 * 8)) + ((((int)threadIdx.x) & 3) * 2));
    if ((((((int)threadIdx.x) >> 6) * 4) + v_14) < 7) {
      values_ptr[0] = sums_ptr[(v_14 * 4)];
      values_ptr[1] = sums_ptr[((v_14 * 4) + 2)];
      values_ptr[2] = sums_ptr[((v_14 * 4) + 16)];
      values_ptr[3] = sums_ptr[((v_14 * 4) + 18)];
      *(float4*)(output_ptr + ((((((((((((int)threadIdx.x) >> 6) * 32) + (v_14 * 8)) / 56) * 50176) + ((((int)blockIdx.x) >> 1) * 7168)) + (((((((((int)threadIdx.x) >> 6) * 32) + (v_14 * 8)) + ((((int)threadIdx.x) & 3) * 2)) % 56) / 14) * 1792)) + ((((int)blockIdx.x) & 1) * 896)) + ((((((((int)threadIdx.x) >> 6) * 32) + (v_14 * 8)) + ((((int)threadIdx.x) & 3) * 2)) % 14) * 64)) + (((((int)threadIdx.x) & 63) >> 2) * 4))) = *(float4*)(values_ptr + 0);
    }
    if (((((((int)threadIdx.x) >> 6) * 32) + (v_14 * 8)) + ((((int)threadIdx.x) & 3) * 2)) < 55) {
      values_ptr[0] = sums_ptr[((v_14 * 4) + 1)];
      values_ptr[1] = sums_ptr[((v_14 * 4) + 3)];
      values_ptr[2] = sums_ptr[((v_14 * 4) + 17)];
      values_ptr[3] = sums_ptr[((v_14 * 4) + 19)];
      int cse_v41 = (((((((int)threadIdx.x) >> 6) * 32) + (v_14 * 8)) + ((((int)threadIdx.x) & 3) * 2)) + 1);
      *(float4*)(output_ptr + ((((((((int)blockIdx.x) >> 1) * 7168) + (((((((((int)threadIdx.x) >> 6) * 32) + (v_14 * 8)) + ((((int)threadIdx.x) & 3) * 2)) + 1) / 14) * 1792)) + ((((int)blockIdx.x) & 1) * 896)) + (((((((((int)threadIdx.x) >> 6) * 32) + (v_14 * 8)) + ((((int)threadIdx.x) & 3) * 2)) + 1) % 14) * 64)) + (((((int)threadIdx.x) & 63) >> 2) * 4))) = *(float4*)(values_ptr + 0);
    }
  }
}
