extern "C" __global__ void __launch_bounds__(128) conv2d_kernel(unsigned char* data_ptr, half* __restrict__ filter_ptr, half* __restrict__ input_ptr) {
  float* __restrict__ products_ptr = (float*)(data_ptr + 0);
  extern __shared__ __align__(128) unsigned char fused_shared[];
  half* tiles_tile = (half*)(fused_shared);
  int thread = ((((int)threadIdx.y) * 32) + ((int)threadIdx.x));
  {
    int producer_block_x = ((int)blockIdx.x);
    for (int v = 0; v < 2; ++v) {
      alignas(64) half loaded_ptr[32];
      alignas(64) half made_ptr[32];
      int cse_v1 = (((int)threadIdx.x) >> 4);
      int cse_v16 = ((((int)threadIdx.x) & 15) * 2);
      int cse_v26 = ((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4));
      int cse_v27 = ((((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4)) / 28) * 2);
      int cse_v28 = ((((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4)) % 28) * 2);
      #pragma unroll
      for (int v_1 = 0; v_1 < 4; ++v_1) {
        #pragma unroll
        for (int v_2 = 0; v_2 < 4; ++v_2) {
          *(half2*)(loaded_ptr + ((v_1 * 8) + (v_2 * 2))) = *(half2*)(input_ptr + (((max(min(((((((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4)) / 28) * 2) + v_1) - 1), 55), 0) * 1792) + (max(min(((((((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4)) % 28) * 2) + v_2) - 1), 55), 0) * 32)) + ((((int)threadIdx.x) & 15) * 2)));
        }
      }
      alignas(64) float given_ptr[16];
      #pragma unroll
      for (int v_3 = 0; v_3 < 4; ++v_3) {
        #pragma unroll
        for (int v_4 = 0; v_4 < 4; ++v_4) {
          int cse_v29 = (((((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4)) / 28) * 2) + v_3);
          int cse_v30 = (((((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4)) % 28) * 2) + v_4);
          float condval;
          if ((((1 <= (((((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4)) / 28) * 2) + v_3)) && ((((((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4)) / 28) * 2) + v_3) < 57)) && (1 <= (((((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4)) % 28) * 2) + v_4))) && ((((((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4)) % 28) * 2) + v_4) < 57)) {
            condval = ((float)loaded_ptr[((v_3 * 8) + (v_4 * 2))]);
          } else {
            condval = 0x0p+0f/*0.000000e+00*/;
          }
          given_ptr[((v_3 * 4) + v_4)] = condval;
        }
      }
      alignas(64) float transformed_half_ptr[16];
      alignas(64) float transformed_ptr[16];
      #pragma unroll
      for (int v_5 = 0; v_5 < 4; ++v_5) {
        alignas(64) float steps_ptr[4];
        int cse_v2 = (v_5 + 8);
        steps_ptr[0] = (given_ptr[(v_5 + 8)] - given_ptr[v_5]);
        int cse_v3 = (v_5 + 4);
        steps_ptr[1] = (given_ptr[(v_5 + 8)] + given_ptr[(v_5 + 4)]);
        steps_ptr[2] = (given_ptr[(v_5 + 8)] - given_ptr[(v_5 + 4)]);
        int cse_v4 = (v_5 + 12);
        steps_ptr[3] = (given_ptr[(v_5 + 12)] - given_ptr[(v_5 + 4)]);
        transformed_half_ptr[v_5] = steps_ptr[0];
        transformed_half_ptr[(v_5 + 4)] = steps_ptr[1];
        transformed_half_ptr[(v_5 + 8)] = steps_ptr[2];
        transformed_half_ptr[(v_5 + 12)] = steps_ptr[3];
      }
      #pragma unroll
      for (int v_6 = 0; v_6 < 4; ++v_6) {
        alignas(64) float steps_ptr_1[4];
        int cse_v5 = (v_6 * 4);
        int cse_v17 = ((v_6 * 4) + 2);
        steps_ptr_1[0] = (transformed_half_ptr[((v_6 * 4) + 2)] - transformed_half_ptr[(v_6 * 4)]);
        int cse_v18 = ((v_6 * 4) + 1);
        steps_ptr_1[1] = (transformed_half_ptr[((v_6 * 4) + 2)] + transformed_half_ptr[((v_6 * 4) + 1)]);
        steps_ptr_1[2] = (transformed_half_ptr[((v_6 * 4) + 2)] - transformed_half_ptr[((v_6 * 4) + 1)]);
        int cse_v19 = ((v_6 * 4) + 3);
        steps_ptr_1[3] = (transformed_half_ptr[((v_6 * 4) + 3)] - transformed_half_ptr[((v_6 * 4) + 1)]);
        transformed_ptr[(v_6 * 4)] = steps_ptr_1[0];
        transformed_ptr[((v_6 * 4) + 1)] = steps_ptr_1[1];
        transformed_ptr[((v_6 * 4) + 2)] = steps_ptr_1[2];
        transformed_ptr[((v_6 * 4) + 3)] = steps_ptr_1[3];
      }
      #pragma unroll
      for (int v_7 = 0; v_7 < 4; ++v_7) {
        #pragma unroll
        for (int v_8 = 0; v_8 < 4; ++v_8) {
          made_ptr[((v_7 * 8) + (v_8 * 2))] = ((half)transformed_ptr[((v_7 * 4) + v_8)]);
        }
      }
      alignas(64) float given_ptr_1[16];
      #pragma unroll
      for (int v_9 = 0; v_9 < 4; ++v_9) {
        #pragma unroll
        for (int v_10 = 0; v_10 < 4; ++v_10) {
          int cse_v31 = (((((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4)) / 28) * 2) + v_9);
          int cse_v32 = (((((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4)) % 28) * 2) + v_10);
          float condval_1;
          if ((((1 <= (((((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4)) / 28) * 2) + v_9)) && ((((((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4)) / 28) * 2) + v_9) < 57)) && (1 <= (((((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4)) % 28) * 2) + v_10))) && ((((((((((int)producer_block_x) * 16) + (v * 8)) + (((int)threadIdx.y) * 2)) + (((int)threadIdx.x) >> 4)) % 28) * 2) + v_10) < 57)) {
            condval_1 = ((float)loaded_ptr[(((v_9 * 8) + (v_10 * 2)) + 1)]);
          } else {
            condval_1 = 0x0p+0f/*0.000000e+00*/;
          }
          given_ptr_1[((v_9 * 4) + v_10)] = condval_1;
        }
      }
      alignas(64) float transformed_half_ptr_1[16];
      alignas(64) float transformed_ptr_1[16];
      #pragma unroll
      for (int v_11 = 0; v_11 < 4; ++v_11) {
        alignas(64) float steps_ptr_2[4];
        int cse_v6 = (v_11 + 8);
        steps_ptr_2[0] = (given_ptr_1[(v_11 + 8)] - given_ptr_1[v_11]);
        int cse_v7 = (v_11 + 4);
        steps_ptr_2[1] = (given_ptr_1[(v_11 + 8)] + given_ptr_1[(v_11 + 4)]);
        steps_ptr_2[2] = (given_ptr_1[(v_11 + 8)] - given_ptr_1[(v_11 + 4)]);
        int cse_v8 = (v_11 + 12);
        steps_ptr_2[3] = (given_ptr_1[(v_11 + 12)] - given_ptr_1[(v_11 + 4)]);
        transformed_half_ptr_1[v_11] = steps_ptr_2[0];
        transformed_half_ptr_1[(v_11 + 4)] = steps_ptr_2[1];
        transformed_half_ptr_1[(v_11 + 8)] = steps_ptr_2[2];
        transformed_half_ptr_1[(v_11 + 12)] = steps_ptr_2[3];
      }
      #pragma unroll
      for (int v_12 = 0; v_12 < 4; ++v_12) {
        alignas(64) float steps_ptr_3[4];
        int cse_v9 = (v_12 * 4);
        int cse_v20 = ((v_12 * 4) + 2);
        steps_ptr_3[0] = (transformed_half_ptr_1[((v_12 * 4) + 2)] - transformed_half_ptr_1[(v_12 * 4)]);
        int cse_v21 = ((v_12 * 4) + 1);
        steps_ptr_3[1] = (transformed_half_ptr_1[((v_12 * 4) + 2)] + transformed_half_ptr_1[((v_12 * 4) + 1)]);
        steps_ptr_3[2] = (transformed_half_ptr_1[((v_12 * 4) + 2)] - transformed_half_ptr_1[((v_12 * 4) + 1)]);
        int cse_v22 = ((v_12 * 4) + 3);
        steps_ptr_3[3] = (transformed_half_ptr_1[((v_12 * 4) + 3)] - transformed_half_ptr_1[((v_12 * 4) + 1)]);
        transformed_ptr_1[(v_12 * 4)] = steps_ptr_3[0];
        transformed_ptr_1[((v_12 * 4) + 1)] = steps_ptr_3[1];
        transformed_ptr_1[((v_12 * 4) + 2)] = steps_ptr_3[2];
        transformed_ptr_1[((v_12 * 4) + 3)] = steps_ptr_3[3];
      }
      #pragma unroll
      for (int v_13 = 0; v_13 < 4; ++v_13) {
        #pragma unroll
        for (int v_14 = 0; v_14 < 4; ++v_14) {
          made_ptr[(((v_13 * 8) + (v_14 * 2)) + 1)] = ((half)transformed_ptr_1[((v_13 * 4) + v_14)]);
        }
      }
      #pragma unroll
      for (int v_15 = 0; v_15 < 4; ++v_15) {
        #pragma unroll
        for (int v_16 = 0; v_16 < 4; ++v_16) {
          *(half2*)(tiles_tile + ((v_15 * 2560) + (v_16 * 640) + (v * 320) + (((int)threadIdx.y) * 80) + ((((int)threadIdx.x) >> 4) * 40) + ((((int)threadIdx.x) & 15) * 2))) = *(half2*)(made_ptr + ((v_15 * 8) + (v_16 * 2)));
        }
      }
    }
  }
  __syncthreads();
  {
    __shared__ alignas(64) half filter_shared_ptr[2560];
    nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, half, nvcuda::wmma::row_major> tiles_fragment_ptr[1];
    nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, half, nvcuda::wmma::row_major> filter_fragment_ptr[2];
    nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> sums_ptr[2];
    for (int v = 0; v < 4; ++v) {
      #pragma unroll
      for (int v_1 = 0; v_1 < 2; ++v_1) {
        nvcuda::wmma::fill_fragment(sums_ptr[v_1], 0x0p+0f/*0.000000e+00*/);
      }
      for (int v_2 = 0; v_2 < 2; ++v_2) {
        int cse_v10 = (((int)threadIdx.y) * 640);
        __syncwarp();
        for (int v_3 = 0; v_3 < 2; ++v_3) {
          *(uint4*)(filter_shared_ptr + ((((((int)threadIdx.y) * 640) + (v_3 * 320)) + ((((int)threadIdx.x) >> 2) * 40)) + ((((int)threadIdx.x) & 3) * 8))) = *(uint4*)(filter_ptr + (((((v * 4096) + (((int)threadIdx.y) * 1024)) + (v_2 * 512)) + (v_3 * 256)) + (((int)threadIdx.x) * 8)));
        }
        nvcuda::wmma::load_matrix_sync(tiles_fragment_ptr[0], (&(tiles_tile[((v * 2560) + (((int)threadIdx.y) * 640) + (v_2 * 16))])), 40);
        __syncwarp();
        #pragma unroll
        for (int v_4 = 0; v_4 < 2; ++v_4) {
          nvcuda::wmma::load_matrix_sync(filter_fragment_ptr[v_4], (&(filter_shared_ptr[((((int)threadIdx.y) * 640) + (v_4 * 16))])), 40);
        }
        #pragma unroll
        for (int v_5 = 0; v_5 < 2; ++v_5) {
          nvcuda::wmma::mma_sync(sums_ptr[v_5], tiles_fragment_ptr[0], filter_fragment_ptr[v_5], sums_ptr[v_5]);
        }
      }
      #pragma unroll
      for (int v_6 = 0; v_6 < 2; ++v_6) {
        nvcuda::wmma::store_matrix_sync((&(products_ptr[((((((int)blockIdx.x) * 8192) + (v * 2048)) + (((int)threadIdx.y) * 512)) + (v_6 * 16))])), sums_ptr[v_6], 32, nvcuda::wmma::mem_row_major);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) conv2d_kernel_1(half* __restrict__ bias_ptr, unsigned char* data_ptr, half* __restrict__ output_ptr) {
  float* __restrict__ products_ptr = (float*)(data_ptr + 0);
  alignas(64) float given_ptr[16];
  #pragma unroll
  for (int v = 0; v < 4; ++v) {
    #pragma unroll
    for (int v_1 = 0; v_1 < 4; ++v_1) {
      given_ptr[((v * 4) + v_1)] = products_ptr[((((((((int)blockIdx.x) >> 1) * 8192) + (v * 2048)) + (v_1 * 512)) + ((((int)blockIdx.x) & 1) * 256)) + ((int)threadIdx.x))];
    }
  }
  alignas(64) float outputs_half_ptr[8];
  alignas(64) float outputs_ptr[4];
  #pragma unroll
  for (int v_2 = 0; v_2 < 4; ++v_2) {
    alignas(64) float steps_ptr[4];
    int cse_v11 = (v_2 + 8);
    int cse_v12 = (v_2 + 4);
    steps_ptr[0] = (given_ptr[(v_2 + 8)] + given_ptr[(v_2 + 4)]);
    steps_ptr[1] = (steps_ptr[0] + given_ptr[v_2]);
    steps_ptr[2] = (given_ptr[(v_2 + 12)] + given_ptr[(v_2 + 4)]);
    steps_ptr[3] = (steps_ptr[2] - given_ptr[(v_2 + 8)]);
    outputs_half_ptr[v_2] = steps_ptr[1];
    outputs_half_ptr[(v_2 + 4)] = steps_ptr[3];
  }
  #pragma unroll
  for (int v_3 = 0; v_3 < 2; ++v_3) {
    alignas(64) float steps_ptr_1[4];
    int cse_v13 = (v_3 * 4);
    int cse_v23 = ((v_3 * 4) + 2);
    int cse_v24 = ((v_3 * 4) + 1);
    steps_ptr_1[0] = (outputs_half_ptr[((v_3 * 4) + 2)] + outputs_half_ptr[((v_3 * 4) + 1)]);
    steps_ptr_1[1] = (steps_ptr_1[0] + outputs_half_ptr[(v_3 * 4)]);
    steps_ptr_1[2] = (outputs_half_ptr[((v_3 * 4) + 3)] + outputs_half_ptr[((v_3 * 4) + 1)]);
    steps_ptr_1[3] = (steps_ptr_1[2] - outputs_half_ptr[((v_3 * 4) + 2)]);
    int cse_v14 = (v_3 * 2);
    outputs_ptr[(v_3 * 2)] = steps_ptr_1[1];
    outputs_ptr[((v_3 * 2) + 1)] = steps_ptr_1[3];
  }
  #pragma unroll
  for (int v_4 = 0; v_4 < 2; ++v_4) {
    #pragma unroll
    for (int v_5 = 0; v_5 < 2; ++v_5) {
      int cse_v15 = (((int)threadIdx.x) & 31);
      int cse_v25 = ((((int)blockIdx.x) * 8) + (((int)threadIdx.x) >> 5));
      output_ptr[((((((((((int)blockIdx.x) * 8) + (((int)threadIdx.x) >> 5)) / 28) * 3584) + (v_4 * 1792)) + ((((((int)blockIdx.x) * 8) + (((int)threadIdx.x) >> 5)) % 28) * 64)) + (v_5 * 32)) + (((int)threadIdx.x) & 31))] = ((half)max((outputs_ptr[((v_4 * 2) + v_5)] + ((float)bias_ptr[(((int)threadIdx.x) & 31)])), 0x0p+0f/*0.000000e+00*/));
    }
  }
}
