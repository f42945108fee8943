// megatron.h: Megatron's token sets, PREFIX.bin and PREFIX.idx: the index, the order in which its GPTDataset draws training samples, bit
// for bit, and a writer. The formats and the order are Megatron-LM's (megatron/core/datasets: indexed_dataset.py, gpt_dataset.py,
// helpers.cpp).
#pragma once

#include <memory>
#include <mutex>
#include <random>
#include <span>

#include "llmc/mapped_memory.h"
#include "llmc/token_file.h"

// .idx: magic, u64 version, u8 type of the ids, u64 sequences, u64 documents + 1, then for each sequence its length (i32) and the byte in
// .bin where it begins (i64), for each document its first sequence (i64; one more entry: all sequences), and in multimodal sets a mode
// for each sequence (i8). Nothing after byte 34 is aligned.
constexpr std::string_view MEGATRON_INDEX_MAGIC("MMIDIDX\0\0", 9);
constexpr int MEGATRON_INDEX_VERSION = 1;

struct MegatronPosition {
    i64 sequence, offset;
};

// The index of a set, mapped. To open it takes no time, however large it is; what only a pass over it can tell is found out when asked for.
class MegatronIndex {
public:
    MegatronIndex(const std::string& path, i64 bin_bytes);

    const std::string& path() const { return path_; }
    i64 bytes() const { return map_.bytes(); }
    IdType id_type() const { return type_; }
    i64 sequences() const { return sequences_; }
    i64 documents() const { return documents_; }
    bool has_modes() const { return has_modes_; }

    i64 length(i64 sequence) const { return load<int32_t>(lengths_, sequence); }    // in tokens
    i64 pointer(i64 sequence) const { return load<int64_t>(pointers_, sequence); }  // in bytes
    void prefetch(i64 sequence) const {
        __builtin_prefetch(lengths_ + sequence * (i64)sizeof(int32_t));
        __builtin_prefetch(pointers_ + sequence * (i64)sizeof(int64_t));
    }
    // Document d is sequences [first_sequence(d), first_sequence(d + 1)).
    i64 first_sequence(i64 document) const;
    int mode(i64 sequence) const { return has_modes_ ? load<int8_t>(modes_, sequence) : 0; }

    // Of the sequences one after the other; reads through the index once. Do they also lie so in .bin?
    i64 tokens() const { return flat().tokens; }
    bool contiguous() const { return flat().contiguous; }
    MegatronPosition find(i64 token) const;

    // All tokens of sequences [begin, end), and a hash of their lengths: what the order of training depends on.
    struct Lengths {
        i64 tokens;
        uint64_t hash;
    };
    Lengths lengths(i64 begin, i64 end) const;

private:
    static constexpr i64 FLAT_STEP = 512;
    struct Flat {
        std::once_flag once;
        bool contiguous;
        i64 tokens;
        std::vector<i64> starts;  // place in the flat stream of every FLAT_STEP-th sequence
    };
    const Flat& flat() const;
    void pass_over(Flat& flat) const;
    i64 checked_length(i64 sequence) const;

    template <typename X>
    i64 load(const char* array, i64 index) const {
        X value;
        memcpy(&value, array + index * sizeof value, sizeof value);
        return value;
    }

    std::string path_;
    i64 bin_bytes_;
    MappedMemory map_;
    IdType type_ = IdType::uint16;
    i64 sequences_ = 0, documents_ = 0;
    bool has_modes_ = false;
    const char *lengths_ = nullptr, *pointers_ = nullptr, *document_starts_ = nullptr, *modes_ = nullptr;
    mutable Flat flat_;
};

// ---------------------------------------------------------------------------------------------------------------
// The order of training

// The sequences of part 0 (training), 1 (validation) or 2 (test) of a split such as "969,30,1": a contiguous range, maybe empty.
// As Megatron-core has it; the older Megatron rounds differently.
Range megatron_split(const std::string& split, int part, i64 sequences);

// NumPy's RandomState(seed).shuffle, of at most NUMPY_SHUFFLE_MAX values: above it draws 64 bit numbers.
constexpr i64 NUMPY_SHUFFLE_MAX = (i64)1 << 32;
template <typename X>
void numpy_shuffle(std::mt19937& random, X* values, i64 n) {
    check(n <= NUMPY_SHUFFLE_MAX, "%lld values to shuffle, wanted %lld at most", (long long)n, (long long)NUMPY_SHUFFLE_MAX);
    for (i64 i = n - 1; i > 0; i--) {
        const uint32_t mask = ~(uint32_t)0 >> __builtin_clz((uint32_t)i);
        uint32_t j;
        do { j = (uint32_t)random() & mask; } while (j > i);
        std::swap(values[i], values[j]);
    }
}

// How often the documents of a set are gone through so that `samples_wanted` samples of S + 1 tokens, which overlap by one, come out; and
// is the last time shuffled apart from the others, because only a part of it is needed?
struct MegatronEpochs {
    i64 epochs, samples;
    bool separate_final_epoch;
    i64 samples_before_final;  // if separate_final_epoch
};
enum class LastSample { drop, keep };  // where the tokens end within a sample. Training drops it; kept, it is shorter.
MegatronEpochs megatron_epochs(i64 tokens_per_epoch, i64 S, i64 samples_wanted, LastSample last = LastSample::drop);

// A NumPy array of whole numbers of one type, a file .npy (version 1) or in memory only.
class IndexArray {
public:
    enum class Type { int32, uint32, int64 };

    IndexArray(Type type, i64 rows, i64 columns) : type_(type), rows_(rows), columns_(columns) {}

    i64 rows() const { return rows_; }
    i64 operator[](i64 i) const {
        switch (type_) {
            case Type::int32:
                return ((const int32_t*)data_)[i];
            case Type::uint32:
                return ((const uint32_t*)data_)[i];
            default:
                return ((const int64_t*)data_)[i];
        }
    }
    // fill(values) with the values as int32_t*, uint32_t* or int64_t*.
    template <typename Function>
    void fill(Function function) {
        switch (type_) {
            case Type::int32:
                return function((int32_t*)data_);
            case Type::uint32:
                return function((uint32_t*)data_);
            default:
                return function((int64_t*)data_);
        }
    }

    void prefetch(i64 i) const { __builtin_prefetch(data_ + i * (type_ == Type::int64 ? 8 : 4)); }

    // One of these before anything else. open() is false if there is no such file, or not one of this type and shape.
    bool open(const std::string& path);
    void create_file(const std::string& path);
    void create_in_memory(const std::string& what);
    void sync(const std::string& path) { memory_.sync(path); }

private:
    std::string header() const;
    i64 bytes() const { return (i64)header().size() + rows_ * std::max<i64>(columns_, 1) * (type_ == Type::int64 ? 8 : 4); }
    void use(MappedMemory memory);

    Type type_;
    i64 rows_, columns_;  // no columns: one dimension
    MappedMemory memory_;
    char* data_ = nullptr;
};

// Training samples of a Megatron set in GPTDataset's order. Its three indices (what document comes when, where each sample begins, which
// sample comes when) take 4 bytes a document and epoch and 12 bytes a sample: in memory, or in cache_folder, where they stay and are
// mapped at the next start by every process. Safe from several threads once made.
class MegatronOrder {
public:
    // Of sequences [documents.begin, documents.end) of the set; see megatron_split.
    MegatronOrder(std::shared_ptr<const TokenFile> file, Range documents, i64 S, i64 samples_wanted, i64 seed,
                  const std::string& cache_folder = "", LastSample last = LastSample::drop);

    i64 samples() const { return epochs_.samples; }  // at least samples_wanted, in training
    i64 epochs() const { return epochs_.epochs; }
    i64 tokens_per_epoch() const { return lengths_.tokens; }
    bool separate_final_epoch() const { return epochs_.separate_final_epoch; }

    // The S + 1 ids of sample k in training order. Returns how many there are: S + 1, or fewer in a kept last sample (the rest is 0).
    i64 read(i64 k, i64 vocab, int32_t* out) const;
    // What read(k) looks up lies at random places, each found in the one before. Of many samples that are about to be read: step 0 of all,
    // then step 1, then step 2, so that the misses of one step overlap.
    static constexpr int PREFETCH_STEPS = 3;
    void prefetch(i64 k, int step) const;

    // The indices, for tests: document_index[], sample_index[][2], shuffle_index[].
    const IndexArray& document_index() const { return document_index_; }
    const IndexArray& sample_index() const { return sample_index_; }
    const IndexArray& shuffle_index() const { return shuffle_index_; }

private:
    static MegatronIndex::Lengths checked_lengths(const MegatronIndex& index, Range documents, i64 S);
    void build_in(const std::string& base, i64 seed);  // files BASE-document_index.npy ...
    void build(i64 seed);
    void build_sample_index();

    std::shared_ptr<const TokenFile> file_;
    const MegatronIndex& index_;
    Range documents_;
    i64 S_;
    MegatronIndex::Lengths lengths_;
    MegatronEpochs epochs_;
    IndexArray document_index_, sample_index_, shuffle_index_;
};

// ---------------------------------------------------------------------------------------------------------------
// Writing

// Writes a set, one sequence a document. It is written aside as PREFIX.bin.tmp and PREFIX.idx.tmp, and appears at publish(); without it
// nothing is left behind. Memory does not grow with the set.
class MegatronWriter {
public:
    MegatronWriter(const std::string& prefix, i64 vocab);
    MegatronWriter(const MegatronWriter&) = delete;
    MegatronWriter& operator=(const MegatronWriter&) = delete;
    ~MegatronWriter();

    i64 documents() const { return documents_; }
    i64 tokens() const { return tokens_; }
    IdType id_type() const { return type_; }

    void write(std::span<const int32_t> ids);  // more of the open document
    void end_document();                       // which may be empty
    void add_document(std::span<const int32_t> ids) {
        write(ids);
        end_document();
    }
    void publish();  // ends an open document

private:
    template <typename Id>
    void write_as(std::span<const int32_t> ids);
    void write_header();
    void write_index();
    void remove_asides() const;

    std::string prefix_;
    i64 vocab_;
    IdType type_;
    std::unique_ptr<File> bin_, idx_;
    i64 documents_ = 0, tokens_ = 0, open_tokens_ = 0;
    bool published_ = false;
};
