// SPDX-License-Identifier: MIT

// Follows addresses through a shader. Qualifiers of the declared blocks do not bind a kernel that
// takes an operand's address apart and makes another reference of it; here every load and store
// through an address is traced back to the operands that the address can come from.
//
// Origins are sets of operands, propagated to a fixed point over all instructions of the module:
// the load of a member of the operand block brings in that operand, arithmetic, selections and
// function variables pass origins on, and what is loaded from a tensor has none.

#include "spirv_flow.hpp"

#include <map>
#include <stdexcept>

namespace shader_bank {
namespace {

using Id = std::uint32_t;
using Words = std::span<const std::uint32_t>;

enum Op : std::uint32_t {
    kNop = 0,
    kLine = 8,
    kExtInst = 12,
    kTypePointer = 32,
    kConstant = 43,
    kSpecConstant = 50,
    kFunction = 54,
    kFunctionParameter = 55,
    kFunctionEnd = 56,
    kFunctionCall = 57,
    kVariable = 59,
    kLoad = 61,
    kStore = 62,
    kCopyMemory = 63,
    kAccessChain = 65,
    kInBoundsAccessChain = 66,
    kPtrAccessChain = 67,
    kInBoundsPtrAccessChain = 70,
    kVectorShuffle = 79,
    kCompositeExtract = 81,
    kCompositeInsert = 82,
    kControlBarrier = 224,
    kMemoryBarrier = 225,
    kAtomicLoad = 227,
    kAtomicStore = 228,
    kAtomicExchange = 229,
    kAtomicXor = 242,
    kLoopMerge = 246,
    kSelectionMerge = 247,
    kLabel = 248,
    kBranch = 249,
    kBranchConditional = 250,
    kSwitch = 251,
    kKill = 252,
    kReturn = 253,
    kReturnValue = 254,
    kUnreachable = 255,
    kNoLine = 317,
    kCooperativeMatrixLoad = 4457,
    kCooperativeMatrixStore = 4458,
    kCooperativeMatrixLoadTensor = 5367,
    kCooperativeMatrixStoreTensor = 5368,
};

constexpr std::uint32_t kStoragePhysicalBuffer = 5349;

bool is_access_chain(std::uint32_t op) {
    return op == kAccessChain || op == kInBoundsAccessChain || op == kPtrAccessChain ||
           op == kInBoundsPtrAccessChain;
}

bool has_no_result(std::uint32_t op) {
    switch (op) {
    case kNop:
    case kLine:
    case kFunctionEnd:
    case kStore:
    case kCopyMemory:
    case kControlBarrier:
    case kMemoryBarrier:
    case kAtomicStore:
    case kLoopMerge:
    case kSelectionMerge:
    case kLabel:
    case kBranch:
    case kBranchConditional:
    case kSwitch:
    case kKill:
    case kReturn:
    case kReturnValue:
    case kUnreachable:
    case kNoLine:
    case kCooperativeMatrixStore:
    case kCooperativeMatrixStoreTensor:
        return true;
    default:
        return false;
    }
}

class Flow {
public:
    Flow(Words words, Id operand_block, std::size_t num_operands)
        : words_(words), operand_block_(operand_block), num_operands_(num_operands) {
        if (num_operands > 64)
            throw std::runtime_error("more than 64 operands");
        each([this](std::uint32_t op, Words args) { declare(op, args); });
        do {
            changed_ = false;
            each([this](std::uint32_t op, Words args) { propagate(op, args); });
        } while (changed_);
        each([this](std::uint32_t op, Words args) { collect(op, args); });
    }

    const Accesses& accesses() const { return accesses_; }

private:
    template <class F>
    void each(F&& visit) const {
        bool in_function = false;
        for (std::size_t at = 5; at < words_.size(); at += words_[at] >> 16) {
            const std::uint32_t op = words_[at] & 0xffff;
            in_function = in_function || op == kFunction;
            if (in_function || op == kTypePointer || op == kVariable || op == kConstant ||
                op == kSpecConstant)
                visit(op, words_.subspan(at + 1, (words_[at] >> 16) - 1));
        }
    }

    void declare(std::uint32_t op, Words args) {
        if (op == kTypePointer) {
            if (args[1] == kStoragePhysicalBuffer)
                physical_pointees_[args[0]] = args[2];
        } else if (op == kConstant) {
            constants_[args[1]] = args[2];
        } else if (op == kFunction) {
            parameters_[current_ = args[1]];
        } else if (op == kFunctionParameter) {
            types_[args[1]] = args[0];
            parameters_[current_].push_back(args[1]);
        } else if (!has_no_result(op) && args.size() >= 2) {
            types_[args[1]] = args[0];
        }
    }

    bool is_physical(Id pointer) const {
        const auto type = types_.find(pointer);
        return type != types_.end() && physical_pointees_.contains(type->second);
    }
    bool is_operand_block(Id pointer) const {
        const auto type = types_.find(pointer);
        if (type == types_.end())
            return false;
        const auto pointee = physical_pointees_.find(type->second);
        return pointee != physical_pointees_.end() && pointee->second == operand_block_;
    }

    std::uint64_t origins(Id id) const {
        const auto found = origins_.find(id);
        return found == origins_.end() ? 0 : found->second;
    }
    void add(Id id, std::uint64_t more) {
        if ((more & ~origins(id)) != 0) {
            origins_[id] |= more;
            changed_ = true;
        }
    }

    void propagate(std::uint32_t op, Words args) {
        if (op == kFunction) {
            current_ = args[1];
        } else if (op == kStore) {
            if (!is_physical(args[0])) // a variable: it keeps what was ever stored
                add(args[0], origins(args[1]));
        } else if (op == kCopyMemory) {
            if (!is_physical(args[0]) && !is_physical(args[1]))
                add(args[0], origins(args[1]));
        } else if (op == kReturnValue) {
            add(current_, origins(args[0]));
        } else if (is_access_chain(op)) {
            propagate_chain(op, args);
        } else if (op == kLoad) {
            if (members_.contains(args[2]) || !is_physical(args[2]))
                add(args[1], origins(args[2]));
            else if (is_operand_block(args[2])) // the whole block at once
                add(args[1], num_operands_ == 64 ? ~0ULL : (1ULL << num_operands_) - 1);
        } else if (op == kFunctionCall) {
            const auto& parameters = parameters_[args[2]];
            for (std::size_t i = 0; i < parameters.size() && i + 3 < args.size(); ++i) {
                add(parameters[i], origins(args[i + 3]));
                if (types_.contains(args[i + 3]) && !is_physical(args[i + 3]))
                    add(args[i + 3], origins(parameters[i])); // a variable passed by pointer
            }
            add(args[1], origins(args[2]));
        } else if (op == kCompositeExtract) {
            add(args[1], origins(args[2]));
        } else if (op == kCompositeInsert || op == kVectorShuffle) {
            add(args[1], origins(args[2]) | origins(args[3]));
        } else if (!has_no_result(op) && !reads_memory(op) && op != kVariable &&
                   op != kTypePointer && op != kConstant && op != kSpecConstant) {
            for (std::size_t i = op == kExtInst ? 4 : 2; i < args.size(); ++i)
                add(args[1], origins(args[i]));
        }
    }

    void propagate_chain(std::uint32_t op, Words args) {
        const Id base = args[2];
        const std::size_t first = op == kPtrAccessChain || op == kInBoundsPtrAccessChain ? 4 : 3;
        if (is_operand_block(base) && args.size() > first) {
            const auto member = constants_.find(args[first]);
            if (member == constants_.end() || member->second >= num_operands_)
                throw std::runtime_error("the operand block is indexed by a variable");
            members_[args[1]] = true;
            add(args[1], 1ULL << member->second);
        } else {
            add(args[1], origins(base));
            if (!is_physical(base)) // what is stored through the chain ends up in the variable
                add(base, origins(args[1]));
        }
    }

    static bool reads_memory(std::uint32_t op) {
        return (op >= kAtomicLoad && op <= kAtomicXor) || op == kCooperativeMatrixLoad ||
               op == kCooperativeMatrixLoadTensor;
    }

    void read(Id pointer) {
        if (is_physical(pointer) && !is_operand_block(pointer) && !members_.contains(pointer))
            note(accesses_.read, pointer, "loads");
    }
    void write(Id pointer) {
        if (members_.contains(pointer) || is_operand_block(pointer))
            throw std::runtime_error("stores into the operand block");
        if (is_physical(pointer))
            note(accesses_.written, pointer, "stores");
    }
    void note(std::uint64_t& set, Id pointer, const char* what) {
        if (origins(pointer) == 0)
            throw std::runtime_error(std::string(what) +
                                     " through an address that comes from no operand");
        set |= origins(pointer);
    }

    void collect(std::uint32_t op, Words args) {
        if (op == kLoad || op == kCooperativeMatrixLoad || op == kCooperativeMatrixLoadTensor ||
            op == kAtomicLoad) {
            read(args[2]);
        } else if (op == kStore || op == kCooperativeMatrixStore ||
                   op == kCooperativeMatrixStoreTensor || op == kAtomicStore) {
            write(args[0]);
        } else if (op == kCopyMemory) {
            write(args[0]);
            read(args[1]);
        } else if (op >= kAtomicExchange && op <= kAtomicXor) {
            read(args[2]);
            write(args[2]);
        }
    }

    Words words_;
    Id operand_block_;
    std::size_t num_operands_;
    std::map<Id, Id> physical_pointees_; // pointer type -> pointee
    std::map<Id, Id> types_;             // result -> type
    std::map<Id, std::uint32_t> constants_;
    std::map<Id, std::vector<Id>> parameters_;
    std::map<Id, bool> members_; // pointers to members of the operand block
    std::map<Id, std::uint64_t> origins_;
    Id current_ = 0;
    bool changed_ = false;
    Accesses accesses_;
};

} // namespace

Accesses trace_accesses(Words words, std::uint32_t operand_block, std::size_t num_operands) {
    return Flow(words, operand_block, num_operands).accesses();
}

} // namespace shader_bank
