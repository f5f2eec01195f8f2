// SPDX-License-Identifier: MIT
// What the kernels of the expert exchange share: which rank owns an expert, and the
// record in which a token travels:
//   hidden [columns4 groups of four elements] | expert ids [top_k] i32 | weights [top_k] f32 | pad
// to a multiple of 16 bytes. Expert ids are local to the receiver, -1 for experts of others.
// Contiguous blocks of experts belong to the ranks in order; the first experts % ranks ranks own
// one more than the others.
#ifndef BELLOWS_EXCHANGE_GLSL
#define BELLOWS_EXCHANGE_GLSL

uint rank_of_expert(uint expert, uint experts, uint ranks) {
    uint share = experts / ranks;
    uint larger = experts % ranks;
    uint in_larger = larger * (share + 1u);
    return expert < in_larger ? expert / (share + 1u) : larger + (expert - in_larger) / share;
}

uint first_expert(uint rank, uint experts, uint ranks) {
    return rank * (experts / ranks) + min(rank, experts % ranks);
}

#endif
