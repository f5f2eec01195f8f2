// SPDX-License-Identifier: MIT
// Of a token (a row of the tensors) its document: the first token in the sequence, and the one
// behind the last. Without documents these are the ends of the sequence. For kernels with an operand
// `documents` and a constant by_document: attention_forward.comp.
#ifndef BELLOWS_ATTENTION_DOCUMENTS_GLSL
#define BELLOWS_ATTENTION_DOCUMENTS_GLSL

uint document_begin(uint token) {
    return by_document != 0u ? push.operands.documents.v[2u * token] : 0u;
}
uint document_end(uint token) {
    return by_document != 0u ? min(push.operands.documents.v[2u * token + 1u], push.seq)
                             : push.seq;
}

#endif
