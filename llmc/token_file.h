// token_file.h: token ids on disk as training reads them, whoever wrote them: llm.c's shards, lit-gpt's packed shards, Megatron's sets.
// The content tells which it is. llmc/shard.h has llm.c's format and its writer, llmc/megatron.h Megatron's index and order.
#pragma once

#include <memory>

#include "llmc/shard.h"

class MegatronIndex;

enum class TokenFileKind { llmc, packed, megatron };

// How an id is stored. The values are the codes of Megatron, which packed shards share; uint32 is llm.c's.
enum class IdType : uint8_t { uint8 = 1, int8 = 2, int16 = 3, int32 = 4, int64 = 5, uint16 = 8, uint32 = 255 };
int id_bytes(IdType type);
const char* id_type_name(IdType type);
// The type that stands for `code` in `path`; floats and unknown codes are refused.
IdType id_type_of_code(int code, const std::string& path);

// The file that holds the tokens of what a user names: a Megatron set may be given as PREFIX, PREFIX.bin or PREFIX.idx.
std::string token_file_path(const std::string& path);

// Reading is one pread each time, so that a file that is cut during the run is an error that names it; mapped, it would be a SIGBUS.
// Safe from several threads.
class TokenFile {
public:
    explicit TokenFile(const std::string& path);
    TokenFile(const TokenFile&) = delete;
    TokenFile& operator=(const TokenFile&) = delete;
    ~TokenFile();

    const std::string& path() const { return path_; }  // of the file with the ids: PREFIX.bin for a Megatron set
    TokenFileKind kind() const { return kind_; }
    std::string describe() const;  // one line: kind, version, type of the ids
    IdType id_type() const { return type_; }
    int bytes_per_token() const { return id_bytes(type_); }
    // Of the first and last 4 KiB (a Megatron set: of both files): tells most sets of one shape apart, and thousands are opened in no time.
    uint64_t fingerprint() const { return fingerprint_; }
    const MegatronIndex* megatron() const { return index_.get(); }  // nullptr for others

    // The file as one stream of tokens: the unused tail of a packed shard left out, a Megatron set's sequences in the order of its index
    // (which is read through once, when the first of these is called).
    i64 tokens() const;
    // ids [begin, begin + count) as int32; each must be in [0, vocab).
    void read(i64 begin, i64 count, i64 vocab, int32_t* out) const;
    // Of one sequence of a Megatron set.
    void read_sequence(i64 sequence, i64 begin, i64 count, i64 vocab, int32_t* out) const;

    // Windows of S + 1 tokens, the last of which only predicts nothing: they overlap by one. A packed shard is made of blocks of S + 1
    // tokens, which do not overlap.
    i64 windows(i64 S) const {
        const i64 n = tokens();
        return kind_ == TokenFileKind::packed ? n / (S + 1) : n > 0 ? (n - 1) / S : 0;
    }
    i64 window_begin(i64 window, i64 S) const { return window * (kind_ == TokenFileKind::packed ? S + 1 : S); }

private:
    void open_llmc(const std::string& start, i64 size, const ShardFormat& format);
    void open_packed(const File& file, const std::string& start);
    void check_size(i64 size, i64 tokens) const;
    i64 tokens_before_filler(const File& file) const;
    void read_ids(i64 offset, i64 count, i64 vocab, int32_t* out, i64 first, i64 sequence) const;

    std::string path_;
    TokenFileKind kind_ = TokenFileKind::llmc;
    IdType type_ = IdType::uint16;
    int version_ = 0;
    i64 data_ = 0;    // byte offset of the first id
    i64 tokens_ = 0;  // of a shard
    i64 slots_ = 0;   // of a packed shard: its size in ids, used or not
    uint64_t fingerprint_ = 0;
    std::unique_ptr<MegatronIndex> index_;
    std::unique_ptr<File> file_;  // none: opened for each read
};
