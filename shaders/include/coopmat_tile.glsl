// SPDX-License-Identifier: MIT
// What a workgroup of a GEMM on matrix units computes.
#ifndef BELLOWS_COOPMAT_TILE_GLSL
#define BELLOWS_COOPMAT_TILE_GLSL

struct CoopmatTile {
    uvec2 a;      // addresses of A and B
    uvec2 b;
    uint lda;     // elements from one stored row to the next
    uint ldb;
    uint m0;      // first row and column of the tile
    uint n0;
    uint rows;    // rows and columns of D that exist
    uint columns;
    uint k_begin; // sum over k_begin <= k < k_end
    uint k_end;
};

#endif
