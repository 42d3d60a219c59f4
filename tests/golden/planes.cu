extern "C" __global__ void __launch_bounds__(32) conv2d_kernel(float* __restrict__ data_ptr, float* __restrict__ filter_ptr, float* __restrict__ output_ptr);
extern "C" __global__ void __launch_bounds__(32) conv2d_kernel(float* __restrict__ data_ptr, float* __restrict__ filter_ptr, float* __restrict__ output_ptr) {
  extern __shared__ __align__(128) float shared_ptr[];
  alignas(64) float sums_ptr[64];
  alignas(64) float window_ptr[4];
  alignas(64) float filter4_ptr[16];
  alignas(64) int first_ptr[4];
  int cse_v1 = (((int)threadIdx.x) >> 4);
  int cse_v2 = (((int)threadIdx.x) & 15);
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    first_ptr[v] = (((v * 152) + ((((int)threadIdx.x) >> 4) * 76)) + (((int)threadIdx.x) & 15));
  }
  #pragma unroll
  for (int v_1 = 0; v_1 < 4; ++v_1) {
    #pragma unroll
    for (int v_2 = 0; v_2 < 16; ++v_2) {
      sums_ptr[((v_1 * 16) + v_2)] = 0x0p+0f/*0.000000e+00*/;
    }
  }
  int cse_v3 = (((int)threadIdx.x) * 4);
  int cse_v4 = (((int)blockIdx.x) & 3);
  int cse_v13 = ((((int)blockIdx.x) & 3) * 2352);
  int cse_v25 = (((((int)blockIdx.x) & 3) * 2352) + (((int)threadIdx.x) * 4));
  if (((int)threadIdx.x) < 28) {
    im2win::copy_async<16>((&(shared_ptr[(((int)threadIdx.x) * 4)])), (&(filter_ptr[(((((int)blockIdx.x) & 3) * 2352) + (((int)threadIdx.x) * 4))])));
  }
  int cse_v5 = (((int)blockIdx.x) / 392);
  int cse_v15 = ((((int)blockIdx.x) % 392) / 28);
  int cse_v16 = ((((int)blockIdx.x) % 28) >> 2);
  for (int v_3 = 0; v_3 < 25; ++v_3) {
    int cse_v14 = ((v_3 * 32) + ((int)threadIdx.x));
    if (((v_3 * 32) + ((int)threadIdx.x)) < 777) {
      #pragma unroll
      for (int v_4 = 0; v_4 < 3; ++v_4) {
        int cse_v26 = (((v_3 * 32) + ((int)threadIdx.x)) / 37);
        int cse_v27 = (((v_3 * 32) + ((int)threadIdx.x)) % 37);
        int cse_v28 = (((((int)blockIdx.x) % 28) >> 2) * 32);
        int cse_v30 = ((((((int)blockIdx.x) % 392) / 28) * 16) + (((v_3 * 32) + ((int)threadIdx.x)) / 37));
        int cse_v31 = ((((((int)blockIdx.x) % 28) >> 2) * 32) + (((v_3 * 32) + ((int)threadIdx.x)) % 37));
        im2win::copy_async<4>((&(shared_ptr[(((((v_4 * 800) + ((((v_3 * 32) + ((int)threadIdx.x)) / 37) * 38)) + (((((v_3 * 32) + ((int)threadIdx.x)) % 37) & 1) * 19)) + ((((v_3 * 32) + ((int)threadIdx.x)) % 37) >> 1)) + 352)])), (&(data_ptr[((((((((((int)blockIdx.x) / 392) * 150528) + (v_4 * 50176)) + (((((int)blockIdx.x) % 392) / 28) * 3584)) + ((((v_3 * 32) + ((int)threadIdx.x)) / 37) * 224)) + (((((int)blockIdx.x) % 28) >> 2) * 32)) + (((v_3 * 32) + ((int)threadIdx.x)) % 37)) - 675)])), ((((3 <= ((((((int)blockIdx.x) % 392) / 28) * 16) + (((v_3 * 32) + ((int)threadIdx.x)) / 37))) && (((((((int)blockIdx.x) % 392) / 28) * 16) + (((v_3 * 32) + ((int)threadIdx.x)) / 37)) < 227)) && (3 <= ((((((int)blockIdx.x) % 28) >> 2) * 32) + (((v_3 * 32) + ((int)threadIdx.x)) % 37)))) && (((((((int)blockIdx.x) % 28) >> 2) * 32) + (((v_3 * 32) + ((int)threadIdx.x)) % 37)) < 227)));
      }
    }
  }
  im2win::commit_copies();
  if (((int)threadIdx.x) < 28) {
    im2win::copy_async<16>((&(shared_ptr[((((int)threadIdx.x) * 4) + 112)])), (&(filter_ptr[((((((int)blockIdx.x) & 3) * 2352) + (((int)threadIdx.x) * 4)) + 112)])));
  }
  im2win::commit_copies();
  for (int v_5 = 0; v_5 < 21; ++v_5) {
    im2win::wait_copies<1>();
    __syncthreads();
    if (v_5 < 19) {
      if (((int)threadIdx.x) < 28) {
        im2win::copy_async<16>((&(shared_ptr[((((v_5 + 2) % 3) * 112) + (((int)threadIdx.x) * 4))])), (&(filter_ptr[(((((((int)blockIdx.x) & 3) * 2352) + (v_5 * 112)) + (((int)threadIdx.x) * 4)) + 224)])));
      }
    }
    im2win::commit_copies();
    int cse_v29 = (((v_5 / 7) * 800) + ((v_5 % 7) * 38));
    #pragma unroll
    for (int v_6 = 0; v_6 < 4; ++v_6) {
      window_ptr[v_6] = shared_ptr[(((((v_5 / 7) * 800) + ((v_5 % 7) * 38)) + first_ptr[v_6]) + 352)];
    }
    int cse_v17 = ((v_5 % 3) * 112);
    #pragma unroll
    for (int v_7 = 0; v_7 < 4; ++v_7) {
      int cse_v6 = (v_7 * 4);
      *(float4*)(filter4_ptr + (v_7 * 4)) = *(float4*)(shared_ptr + (((v_5 % 3) * 112) + (v_7 * 4)));
    }
    #pragma unroll
    for (int v_8 = 0; v_8 < 4; ++v_8) {
      #pragma unroll
      for (int v_9 = 0; v_9 < 16; ++v_9) {
        int cse_v18 = ((v_8 * 16) + v_9);
        sums_ptr[((v_8 * 16) + v_9)] = (sums_ptr[((v_8 * 16) + v_9)] + (filter4_ptr[v_9] * window_ptr[v_8]));
      }
    }
    #pragma unroll
    for (int v_10 = 0; v_10 < 4; ++v_10) {
      window_ptr[v_10] = shared_ptr[(((((v_5 / 7) * 800) + ((v_5 % 7) * 38)) + first_ptr[v_10]) + 371)];
    }
    #pragma unroll
    for (int v_11 = 0; v_11 < 4; ++v_11) {
      int cse_v7 = (v_11 * 4);
      *(float4*)(filter4_ptr + (v_11 * 4)) = *(float4*)(shared_ptr + ((((v_5 % 3) * 112) + (v_11 * 4)) + 16));
    }
    #pragma unroll
    for (int v_12 = 0; v_12 < 4; ++v_12) {
      #pragma unroll
      for (int v_13 = 0; v_13 < 16; ++v_13) {
        int cse_v19 = ((v_12 * 16) + v_13);
        sums_ptr[((v_12 * 16) + v_13)] = (sums_ptr[((v_12 * 16) + v_13)] + (filter4_ptr[v_13] * window_ptr[v_12]));
      }
    }
    #pragma unroll
    for (int v_14 = 0; v_14 < 4; ++v_14) {
      window_ptr[v_14] = shared_ptr[(((((v_5 / 7) * 800) + ((v_5 % 7) * 38)) + first_ptr[v_14]) + 353)];
    }
    #pragma unroll
    for (int v_15 = 0; v_15 < 4; ++v_15) {
      int cse_v8 = (v_15 * 4);
      *(float4*)(filter4_ptr + (v_15 * 4)) = *(float4*)(shared_ptr + ((((v_5 % 3) * 112) + (v_15 * 4)) + 32));
    }
    #pragma unroll
    for (int v_16 = 0; v_16 < 4; ++v_16) {
      #pragma unroll
      for (int v_17 = 0; v_17 < 16; ++v_17) {
        int cse_v20 = ((v_16 * 16) + v_17);
        sums_ptr[((v_16 * 16) + v_17)] = (sums_ptr[((v_16 * 16) + v_17)] + (filter4_ptr[v_17] * window_ptr[v_16]));
      }
    }
    #pragma unroll
    for (int v_18 = 0; v_18 < 4; ++v_18) {
      window_ptr[v_18] = shared_ptr[(((((v_5 / 7) * 800) + ((v_5 % 7) * 38)) + first_ptr[v_18]) + 372)];
    }
    #pragma unroll
    for (int v_19 = 0; v_19 < 4; ++v_19) {
      int cse_v9 = (v_19 * 4);
      *(float4*)(filter4_ptr + (v_19 * 4)) = *(float4*)(shared_ptr + ((((v_5 % 3) * 112) + (v_19 * 4)) + 48));
    }
    #pragma unroll
    for (int v_20 = 0; v_20 < 4; ++v_20) {
      #pragma unroll
      for (int v_21 = 0; v_21 < 16; ++v_21) {
        int cse_v21 = ((v_20 * 16) + v_21);
        sums_ptr[((v_20 * 16) + v_21)] = (sums_ptr[((v_20 * 16) + v_21)] + (filter4_ptr[v_21] * window_ptr[v_20]));
      }
    }
    #pragma unroll
    for (int v_22 = 0; v_22 < 4; ++v_22) {
      window_ptr[v_22] = shared_ptr[(((((v_5 / 7) * 800) + ((v_5 % 7) * 38)) + first_ptr[v_22]) + 354)];
    }
    #pragma unroll
    for (int v_23 = 0; v_23 < 4; ++v_23) {
      int cse_v10 = (v_23 * 4);
      *(float4*)(filter4_ptr + (v_23 * 4)) = *(float4*)(shared_ptr + ((((v_5 % 3) * 112) + (v_23 * 4)) + 64));
    }
    #pragma unroll
    for (int v_24 = 0; v_24 < 4; ++v_24) {
      #pragma unroll
      for (int v_25 = 0; v_25 < 16; ++v_25) {
        int cse_v22 = ((v_24 * 16) + v_25);
        sums_ptr[((v_24 * 16) + v_25)] = (sums_ptr[((v_24 * 16) + v_25)] + (filter4_ptr[v_25] * window_ptr[v_24]));
      }
    }
    #pragma unroll
    for (int v_26 = 0; v_26 < 4; ++v_26) {
      window_ptr[v_26] = shared_ptr[(((((v_5 / 7) * 800) + ((v_5 % 7) * 38)) + first_ptr[v_26]) + 373)];
    }
    #pragma unroll
    for (int v_27 = 0; v_27 < 4; ++v_27) {
      int cse_v11 = (v_27 * 4);
      *(float4*)(filter4_ptr + (v_27 * 4)) = *(float4*)(shared_ptr + ((((v_5 % 3) * 112) + (v_27 * 4)) + 80));
    }
    #pragma unroll
    for (int v_28 = 0; v_28 < 4; ++v_28) {
      #pragma unroll
      for (int v_29 = 0; v_29 < 16; ++v_29) {
        int cse_v23 = ((v_28 * 16) + v_29);
        sums_ptr[((v_28 * 16) + v_29)] = (sums_ptr[((v_28 * 16) + v_29)] + (filter4_ptr[v_29] * window_ptr[v_28]));
      }
    }
    #pragma unroll
    for (int v_30 = 0; v_30 < 4; ++v_30) {
      window_ptr[v_30] = shared_ptr[(((((v_5 / 7) * 800) + ((v_5 % 7) * 38)) + first_ptr[v_30]) + 355)];
    }
    #pragma unroll
    for (int v_31 = 0; v_31 < 4; ++v_31) {
      int cse_v12 = (v_31 * 4);
      *(float4*)(filter4_ptr + (v_31 * 4)) = *(float4*)(shared_ptr + ((((v_5 % 3) * 112) + (v_31 * 4)) + 96));
    }
    #pragma unroll
    for (int v_32 = 0; v_32 < 4; ++v_32) {
      #pragma unroll
      for (int v_33 = 0; v_33 < 16; ++v_33) {
        int cse_v24 = ((v_32 * 16) + v_33);
        sums_ptr[((v_32 * 16) + v_33)] = (sums_ptr[((v_32 * 16) + v_33)] + (filter4_ptr[v_33] * window_ptr[v_32]));
      }
    }
  }
  alignas(64) float values_ptr[1];
  #pragma unroll
  for (int v_34 = 0; v_34 < 4; ++v_34) {
    #pragma unroll
    for (int v_35 = 0; v_35 < 16; ++v_35) {
      values_ptr[0] = sums_ptr[((v_34 * 16) + v_35)];
      output_ptr[(((((((((((int)blockIdx.x) / 392) * 802816) + ((((int)blockIdx.x) & 3) * 200704)) + (v_35 * 12544)) + (((((int)blockIdx.x) % 392) / 28) * 896)) + (v_34 * 224)) + ((((int)threadIdx.x) >> 4) * 112)) + (((((int)blockIdx.x) % 28) >> 2) * 16)) + (((int)threadIdx.x) & 15))] = values_ptr[0];
    }
  }
}
