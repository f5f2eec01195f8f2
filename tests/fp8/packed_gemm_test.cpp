// SPDX-License-Identifier: MIT
// Dense products of packed operands: weights that are packed ahead, and what packing must not
// change.

#include "fp8/dense_rig.hpp"

namespace bellows {
namespace {

using namespace testing;

class Fp8PackedGemm : public Fp8DenseTest {};

TEST_F(Fp8PackedGemm, PrepackedWeights) {
    if (!fp8::why_not(device(), fp8::Variant::Packed).empty()) {
        const Shape s{8, 8, 128};
        const Input b = make_b(GemmForm::NT, kind(Blocks::Blocks128), s);
        EXPECT_EQ(fp8::prepacked_bytes(device(), *b.operand->quantized, GemmForm::NT), 0u);
        expect_refused(
            [&](Recording& r) { fp8::prepack(r, *b.operand->quantized, GemmForm::NT, {}); },
            {"prepack"});
        return;
    }
    const bool cpu = device().info().is_cpu; // whose compiler takes its time
    way_ = fp8::Variant::Device;             // which prefers them
    std::vector<Shape> shapes = {{7, 37, 300}, {20, 140, 300}, {129, 37, 300}, {3, 130, 129, 2}};
    if (!cpu)
        shapes.insert(shapes.end(),
                      {{16, 72, 900}, {20, 129, 1200}, {33, 40, 520}, {64, 256, 260}});
    for (const GemmForm form : {GemmForm::NT, GemmForm::NN})
        for (const bool own_scales : {false, true})
            for (const Shape& s : shapes) {
                if (cpu && (own_scales || (form == GemmForm::NN && s.m > 7)))
                    continue;
                SCOPED_TRACE(std::string(kFormNames[static_cast<int>(form)]) + " " +
                             std::to_string(s.m) + " x " + std::to_string(s.n) + " x " +
                             std::to_string(s.k) + (own_scales ? "" : ", 128x128"));
                const Blocks own = form == GemmForm::NT ? Blocks::Rows128 : Blocks::Columns128;
                const Input a = make_a(form, kind(Blocks::Rows128), s);
                Input b = make_b(form, kind(own_scales ? own : Blocks::Blocks128), s);
                const fp8::Quantized codes = *b.operand->quantized;
                b.buffers.push_back(workspace(fp8::prepacked_bytes(device(), codes, form)));
                run([&](Recording& r) {
                    b.operand = fp8::prepack(r, codes, form, b.buffers.back().view());
                });
                // Once packed the codes are not read again.
                const std::vector<std::uint8_t> nans(codes.codes.buffer.bytes, fp8::kNanCode);
                device().upload(codes.codes.buffer, std::span<const std::uint8_t>(nans));
                check(form, a, b, s, DType::F32);
                check(form, a, b, s, DType::F32, true);
                check(form, a, b, s, DType::BF16, true);
            }
}

TEST_F(Fp8PackedGemm, GroupsThatArePrepackedAloneAreThoseOfTheWhole) {
    if (!fp8::why_not(device(), fp8::Variant::Packed).empty())
        return;
    const Shape s{1, 130, 129, 3};
    for (const GemmForm form : {GemmForm::NT, GemmForm::NN})
        for (const bool own_scales : {false, true}) {
            SCOPED_TRACE(std::string(kFormNames[static_cast<int>(form)]) +
                         (own_scales ? "" : ", 128x128"));
            const Blocks own = form == GemmForm::NT ? Blocks::Rows128 : Blocks::Columns128;
            const Input b = make_b(form, kind(own_scales ? own : Blocks::Blocks128), s);
            const fp8::Quantized& codes = *b.operand->quantized;
            const Buffer whole = workspace(fp8::prepacked_bytes(device(), codes, form)),
                         parts = workspace(whole.size());
            run([&](Recording& r) {
                r.fill(whole.view(), 0);
                r.fill(parts.view(), 0);
                fp8::prepack(r, codes, form, whole.view());
                fp8::prepack(r, codes, form, parts.view(), 1, 2);
                fp8::prepack(r, codes, form, parts.view(), 0, 1);
            });
            const auto expected = read_back<std::uint8_t>(device(), whole.view());
            EXPECT_EQ(read_back<std::uint8_t>(device(), parts.view()), expected);
            EXPECT_NE(std::ranges::count(expected, 0), static_cast<long>(expected.size()));
            expect_refused([&](Recording& r) { fp8::prepack(r, codes, form, whole.view(), 2, 2); },
                           {"prepack", "groups [2, +2)"});
        }
}

TEST_F(Fp8PackedGemm, PackedOperandsOnMatrixUnits) {
    const std::string reason = fp8::why_not(device(), fp8::Variant::Packed);
    way_ = fp8::Variant::Packed;
    if (!reason.empty()) {
        const Shape s{8, 8, 128};
        const Input a = make_a(GemmForm::NT, kind(Blocks::Rows128), s),
                    b = make_b(GemmForm::NT, kind(Blocks::Blocks128), s);
        const OpTensor d = padded(DType::F32, {s.m, s.n});
        const Buffer scratch = workspace_for(*a.operand, *b.operand);
        expect_refused([&](Recording& r) { record(r, GemmForm::NT, a, b, d, false, scratch); },
                       {"packed", reason});
        return;
    }
    // A CPU's compiler takes half a minute for a kernel: there, one of them, for an odd N, 128x128
    // blocks and f32, must do.
    const bool cpu = device().info().is_cpu;
    const std::vector<Shape> shapes =
        cpu ? std::vector<Shape>{{129, 37, 200}, {7, 5, 129, 2}}
            : std::vector<Shape>{
                  {1, 1, 1}, {130, 129, 200}, {257, 36, 513}, {17, 130, 128}, {70, 66, 129, 3}};
    const std::vector<bool> blocks_or_rows =
        cpu ? std::vector<bool>{true} : std::vector<bool>{true, false};
    const std::vector<int> spreads =
        cpu ? std::vector<int>{22, 24} : std::vector<int>{8, 20, 21, 22, 23, 24, 60};
    for (const GemmForm form : kForms) {
        const bool tn = form == GemmForm::TN;
        const Kind own_a = kind(tn ? Blocks::Columns128 : Blocks::Rows128);
        const Kind own_b = kind(form == GemmForm::NT ? Blocks::Rows128 : Blocks::Columns128);
        for (const Shape& s : shapes)
            for (const bool blocks : blocks_or_rows) {
                SCOPED_TRACE(std::string(kFormNames[static_cast<int>(form)]) + " " +
                             std::to_string(s.m) + " x " + std::to_string(s.n) + " x " +
                             std::to_string(s.k) + (blocks ? ", 128x128" : ""));
                const Input a = make_a(form, own_a, s),
                            b = make_b(form, blocks ? kind(Blocks::Blocks128) : own_b, s);
                check(form, a, b, s, DType::F32, blocks);
                if (!cpu)
                    check(form, a, b, s, DType::BF16, !blocks);
            }
        // 2^22 is what f16 holds; beyond, the slow loop must serve.
        const Shape s{cpu ? 3u : 40u, cpu ? 5u : 24u, 520};
        for (const int spread : spreads)
            for (const bool blocks : blocks_or_rows) {
                SCOPED_TRACE(std::string(kFormNames[static_cast<int>(form)]) + ", scales over 2^" +
                             std::to_string(spread));
                const Input a = input(own_a, tn ? extents(0, s.k, s.m) : extents(0, s.m, s.k),
                                      tn ? steep(s.k, s.m, spread, true, 5)
                                         : steep(s.m, s.k, spread, false, 5));
                const Input b = make_b(form, blocks ? kind(Blocks::Blocks128) : own_b, s);
                check(form, a, b, s, DType::F32);
                if (!cpu)
                    check(form, a, b, s, DType::BF16, true);
            }
    }
}

} // namespace
} // namespace bellows
