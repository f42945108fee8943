#include "llmc/token_file.h"

#include <sys/resource.h>
#include <xxhash.h>

#include <atomic>

#include "llmc/megatron.h"

namespace {

constexpr i64 FINGERPRINT_BYTES = 4096;
static_assert(FINGERPRINT_BYTES >= SHARD_HEADER_BYTES);

// ---------------------------------------------------------------------------------------------------------------
// What people pass by mistake, recognised by its first bytes so that the error can name it.

constexpr std::string_view MEGATRON_MAGIC = MEGATRON_INDEX_MAGIC.substr(0, 7), PACKED_MAGIC = "LITPKDS";
constexpr char TOKENIZE_AGAIN[] = "tokenize the text again with ./tokenize",
               PASS_SHARDS[] = "pass the token shards (PREFIX_000000.bin ...)";

struct KnownFormat {
    std::string_view start;
    const char *name, *hint;
};
constexpr KnownFormat KNOWN_FORMATS[] = {
    {MEGATRON_MAGIC, "a Megatron index", "pass the set's PREFIX, PREFIX.bin or PREFIX.idx"},
    {"TNTIDX", "an old Megatron index (TNTIDX)", "only MMIDIDX sets are read; tokenize the text again with ./tokenize or a newer Megatron"},
    {"BIN.TOK\n", "an llmq token file", TOKENIZE_AGAIN},
    {"\x93NUMPY", "a NumPy array", TOKENIZE_AGAIN},
    {"PAR1", "a Parquet file", "it holds text: make JSON Lines of it, then shards with ./tokenize"},
    {"version https://git-lfs", "a Git LFS pointer, not the file itself", "run git lfs pull"},
    {"\x1f\x8b", "a gzip file", "unpack it; if it holds text, ./tokenize reads it as it is"},
    {"\x28\xb5\x2f\xfd", "a zstd file", "unpack it; if it holds text, ./tokenize reads it as it is"},
};
struct KnownMagic {
    int32_t magic;
    const char *name, *hint;
};
constexpr KnownMagic KNOWN_MAGICS[] = {
    {20240522, "an llm.c evaluation file", "evaluation files are not read yet; pass the token shards (PREFIX_000000.bin ...)"},
    {20240326, "an llm.c model checkpoint", PASS_SHARDS},
    {20240327, "an llm.c debug state", PASS_SHARDS},
    {20240328, "an llm.c tokenizer", PASS_SHARDS},
};

int32_t first_int(std::string_view start) {
    int32_t magic = 0;
    if (start.size() >= sizeof magic) { memcpy(&magic, start.data(), sizeof magic); }
    return magic;
}

const ShardFormat* llmc_format(std::string_view start) {
    for (const ShardFormat* f : {&SHARD_16_BIT, &SHARD_32_BIT}) {
        if (first_int(start) == f->magic) { return f; }
    }
    return nullptr;
}

struct Guess {
    std::string name, hint;
};
Guess guess_format(std::string_view start) {
    if (start.empty()) { return {"empty (0 bytes)", "make it again"}; }
    for (const KnownFormat& f : KNOWN_FORMATS) {
        if (start.starts_with(f.start)) { return {f.name, f.hint}; }
    }
    for (const KnownMagic& m : KNOWN_MAGICS) {
        if (first_int(start) == m.magic) { return {m.name, m.hint}; }
    }
    bool text = true;
    for (const unsigned char c : start) { text = text && (c >= ' ' || c == '\n' || c == '\r' || c == '\t') && c != 0x7f; }
    if (text) { return {"a text file", "make shards of it: ./tokenize --tokenizer FILE --out PREFIX INPUT"}; }
    return {format("of an unknown kind (it starts with the int32 %d)", first_int(start)),
            "shards come from ./tokenize or from llm.c's data scripts"};
}

[[noreturn]] void refuse(const std::string& path, std::string_view start, const std::string& hint) {
    const Guess guess = guess_format(start);
    die("'%s' is not a file of tokens: it is %s; wanted an llm.c shard (magic number %d or %d), a lit-gpt packed shard (LITPKDS) or a "
        "Megatron set (PREFIX.bin and PREFIX.idx)\nHINT: %s%s",
        path.c_str(), guess.name.c_str(), SHARD_16_BIT.magic, SHARD_32_BIT.magic, guess.hint.c_str(), hint.c_str());
}

// ---------------------------------------------------------------------------------------------------------------

// So many files of a process stay open; the others are opened for each read, so that thousands of them do not use up its descriptors.
i64 files_to_keep_open() {
    constexpr i64 ENOUGH = 256;
    struct rlimit limit = {};
    check(getrlimit(RLIMIT_NOFILE, &limit) == 0, "cannot read the limit of open files: %s", strerror(errno));
    return std::min<rlim_t>(ENOUGH, limit.rlim_cur / 4);
}
std::atomic<i64> files_of_process = 0;

std::unique_ptr<File> open_to_read(const std::string& path) { return std::make_unique<File>(path, "rbe"); }

std::string first_bytes(const File& file) {
    std::string start(std::min(file.size(), FINGERPRINT_BYTES), '\0');
    file.read_at(start.data(), start.size(), 0);
    return start;
}

uint64_t fingerprint_of_ends(const File& file) {
    const std::string start = first_bytes(file);
    std::string end = start;
    file.read_at(end.data(), end.size(), file.size() - (i64)end.size());
    return XXH3_64bits_withSeed(end.data(), end.size(), XXH3_64bits(start.data(), start.size()));
}

void check_is_file(const std::string& path) {
    check(path_exists(path), "cannot open '%s' for reading: %s", path.c_str(), strerror(errno));
    check(!is_directory(path), "'%s' is a folder; wanted a file of tokens\nHINT: write a pattern that matches its files: '%s/*.bin'",
          path.c_str(), path.c_str());
    check(is_regular_file(path), "'%s' is a pipe or a device; wanted a file\nHINT: copy it to a file", path.c_str());
}

std::string without_suffix(const std::string& path, std::string_view suffix) { return path.substr(0, path.size() - suffix.size()); }

// Of the ids of one type: as int32, and the largest, a negative one larger than any that could be valid. One pass without branches.
template <typename Id>
uint64_t convert(const char* in, i64 count, int32_t* out) {
    using Wide = std::conditional_t<sizeof(Id) == 8, uint64_t, uint32_t>;
    Wide largest = 0;
    for (i64 i = 0; i < count; i++) {
        Id id;
        memcpy(&id, in + i * sizeof id, sizeof id);
        out[i] = (int32_t)id;
        largest = std::max(largest, (Wide)id);
    }
    return largest;
}
using Converter = uint64_t (*)(const char* in, i64 count, int32_t* out);

// One id as it is, for messages.
template <typename Id>
i64 load(const char* in) {
    Id id;
    memcpy(&id, in, sizeof id);
    return (i64)id;
}

struct IdTypeRow {
    IdType type;
    int bytes;
    const char* name;
    Converter convert;
    i64 (*load)(const char* in);
};
template <typename Id>
constexpr IdTypeRow id_type_row(IdType type, const char* name) {
    return {type, sizeof(Id), name, convert<Id>, load<Id>};
}
constexpr IdTypeRow ID_TYPES[] = {
    id_type_row<uint8_t>(IdType::uint8, "uint8"),    id_type_row<int8_t>(IdType::int8, "int8"),
    id_type_row<int16_t>(IdType::int16, "int16"),    id_type_row<int32_t>(IdType::int32, "int32"),
    id_type_row<int64_t>(IdType::int64, "int64"),    id_type_row<uint16_t>(IdType::uint16, "uint16"),
    id_type_row<uint32_t>(IdType::uint32, "uint32"),
};
const IdTypeRow& row_of(IdType type) {
    return *std::find_if(std::begin(ID_TYPES), std::end(ID_TYPES), [&](const IdTypeRow& row) { return row.type == type; });
}

}  // namespace

int id_bytes(IdType type) { return row_of(type).bytes; }
const char* id_type_name(IdType type) { return row_of(type).name; }

IdType id_type_of_code(int code, const std::string& path) {
    for (const IdTypeRow& row : ID_TYPES) {
        if ((int)row.type == code && row.type != IdType::uint32) { return row.type; }
    }
    const bool is_float = code == 6 || code == 7;  // which is which depends on the writer
    die("'%s': the ids' type has code %d, %s; wanted 1 (uint8), 2 (int8), 3 (int16), 4 (int32), 5 (int64) or 8 (uint16)\nHINT: %s",
        path.c_str(), code, is_float ? "a float" : "which is none",
        is_float ? "it does not hold token ids" : "the file is broken, or from a newer writer; make it again");
}

std::string token_file_path(const std::string& path) {
    if (path.ends_with(".idx")) { return without_suffix(path, ".idx") + ".bin"; }
    const bool is_prefix = !is_regular_file(path) && (is_regular_file(path + ".idx") || is_regular_file(path + ".bin"));
    return is_prefix ? path + ".bin" : path;
}

// ---------------------------------------------------------------------------------------------------------------

TokenFile::TokenFile(const std::string& given) : path_(token_file_path(given)) {
    const bool index_given = given.ends_with(".idx");
    const std::string index = path_.ends_with(".bin") ? without_suffix(path_, ".bin") + ".idx" : "";
    if (index_given) { check_is_file(index); }
    const bool has_index = is_regular_file(index);
    const std::string index_start = has_index ? first_bytes(*open_to_read(index)) : "";
    const bool is_set = index_start.starts_with(MEGATRON_MAGIC);
    if (index_given && !is_set) { refuse(index, index_start, ""); }
    check(!is_set || path_exists(path_),
          "'%s' is a Megatron index without its tokens: '%s': %s\nHINT: a set is a .bin and an .idx file; copy both", index.c_str(),
          path_.c_str(), strerror(ENOENT));
    check_is_file(path_);
    std::unique_ptr<File> file = open_to_read(path_);
    const std::string start = first_bytes(*file);
    fingerprint_ = fingerprint_of_ends(*file);
    // A Megatron .bin has no header: what it holds is for the .idx to say. An .idx of another kind beside a shard changes nothing.
    const ShardFormat* of_llmc = llmc_format(start);
    if (is_set) {
        kind_ = TokenFileKind::megatron;
        index_ = std::make_unique<MegatronIndex>(index, file->size());
        type_ = index_->id_type();
        version_ = MEGATRON_INDEX_VERSION;
        const uint64_t of_index = fingerprint_of_ends(*open_to_read(index));
        fingerprint_ = XXH3_64bits_withSeed(&of_index, sizeof of_index, fingerprint_);
    } else if (of_llmc != nullptr) {
        open_llmc(start, file->size(), *of_llmc);
    } else if (start.starts_with(PACKED_MAGIC)) {
        open_packed(*file, start);
    } else if (has_index) {
        refuse(index, index_start, "");
    } else {
        refuse(path_, start,
               index.empty() ? "" : format("; a Megatron set needs its index beside it, and there is no '%s'", index.c_str()));
    }
    if (files_of_process++ < files_to_keep_open()) { file_ = std::move(file); }
}

TokenFile::~TokenFile() { files_of_process--; }

void TokenFile::open_llmc(const std::string& start, i64 size, const ShardFormat& format) {
    ShardHeader header = {};
    memcpy(&header, start.data(), std::min(start.size(), sizeof header));
    check(size >= SHARD_HEADER_BYTES, "shard '%s' is cut: found %lld bytes, wanted a header of %lld\nHINT: copy or make it again",
          path_.c_str(), (long long)size, (long long)SHARD_HEADER_BYTES);
    check(header.version == format.version,
          "shard '%s': found version %d, wanted %d for magic number %d\nHINT: it comes from another release of its writer; make it again",
          path_.c_str(), header.version, format.version, format.magic);
    check(header.tokens >= 0,
          "shard '%s': the header counts %d tokens, wanted 0 or more\nHINT: its writer passed 2^31 tokens; make smaller shards",
          path_.c_str(), header.tokens);
    kind_ = TokenFileKind::llmc;
    type_ = format.bytes_per_token == 2 ? IdType::uint16 : IdType::uint32;
    version_ = format.version;
    data_ = SHARD_HEADER_BYTES;
    tokens_ = header.tokens;
    check_size(size, tokens_);
}

// "LITPKDS", u64 version, u8 code of the ids' type, u64 number of ids; then the ids.
void TokenFile::open_packed(const File& file, const std::string& start) {
    constexpr i64 HEADER_BYTES = 24;
    check((i64)start.size() >= HEADER_BYTES,
          "packed shard '%s' is cut: found %zu bytes, wanted a header of %lld\nHINT: copy or make it again", path_.c_str(), start.size(),
          (long long)HEADER_BYTES);
    uint64_t version, slots;
    memcpy(&version, &start[7], sizeof version);
    memcpy(&slots, &start[16], sizeof slots);
    check(version == 1, "packed shard '%s': found version %llu, wanted 1\nHINT: it comes from another release of its writer; make it again",
          path_.c_str(), (unsigned long long)version);
    type_ = id_type_of_code((uint8_t)start[15], path_);
    kind_ = TokenFileKind::packed;
    version_ = 1;
    data_ = HEADER_BYTES;
    check(slots <= (uint64_t)std::numeric_limits<i64>::max() / 16,
          "packed shard '%s': the header counts %llu tokens\nHINT: it is broken; copy or make it again", path_.c_str(),
          (unsigned long long)slots);
    slots_ = (i64)slots;
    check_size(file.size(), slots_);
    tokens_ = tokens_before_filler(file);
}

void TokenFile::check_size(i64 size, i64 tokens) const {
    const i64 wanted = data_ + tokens * bytes_per_token();
    check(size == wanted,
          "shard '%s': found %lld bytes, wanted %lld for the %lld tokens of %d bytes that its header states\nHINT: the file is cut or "
          "still being written; copy or make it again",
          path_.c_str(), (long long)size, (long long)wanted, (long long)tokens, bytes_per_token());
}

// The unused tail of a packed shard holds the separator over and over; the first of that run is the last document's own. Nothing else tells
// the tail, so a full shard that happens to end with one id n times is taken to be n - 1 tokens shorter.
i64 TokenFile::tokens_before_filler(const File& file) const {
    constexpr i64 PIECE = 1 << 16;
    const i64 bytes = bytes_per_token();
    std::vector<char> ids(PIECE * bytes), last(bytes);
    for (i64 end = slots_; end > 0;) {
        const i64 begin = std::max<i64>(0, end - PIECE);
        file.read_at(ids.data(), (end - begin) * bytes, data_ + begin * bytes);
        if (end == slots_) { memcpy(last.data(), &ids[(end - begin - 1) * bytes], bytes); }
        for (i64 i = end - begin; i > 0; i--) {
            if (memcmp(&ids[(i - 1) * bytes], last.data(), bytes) != 0) { return std::min(begin + i + 1, slots_); }
        }
        end = begin;
    }
    return std::min<i64>(1, slots_);
}

std::string TokenFile::describe() const {
    const char* type = id_type_name(type_);
    switch (kind_) {
        case TokenFileKind::llmc:
            return format("llm.c shard, magic %d, version %d, %s ids", (type_ == IdType::uint16 ? SHARD_16_BIT : SHARD_32_BIT).magic,
                          version_, type);
        case TokenFileKind::packed:
            return format("lit-gpt packed shard, version %d, %s ids, %lld of %lld places used", version_, type, (long long)tokens_,
                          (long long)slots_);
        case TokenFileKind::megatron:
            return format("Megatron set, version %d, %s ids, %lld sequences in %lld documents%s", version_, type,
                          (long long)index_->sequences(), (long long)index_->documents(), index_->has_modes() ? ", multimodal" : "");
    }
    return "";
}

// ---------------------------------------------------------------------------------------------------------------

i64 TokenFile::tokens() const { return index_ ? index_->tokens() : tokens_; }

void TokenFile::read(i64 begin, i64 count, i64 vocab, int32_t* out) const {
    const i64 n = tokens();
    check(begin >= 0 && count >= 0 && count <= n - begin, "'%s': tokens [%lld, %lld) are not among its %lld", path_.c_str(),
          (long long)begin, (long long)(begin + count), (long long)n);
    if (!index_ || index_->contiguous()) {
        const i64 data = index_ && n > 0 ? index_->pointer(0) : data_;
        return read_ids(data + begin * bytes_per_token(), count, vocab, out, begin, -1);
    }
    for (MegatronPosition at = index_->find(begin); count > 0; at = {at.sequence + 1, 0}) {
        const i64 part = std::min(count, index_->length(at.sequence) - at.offset);
        read_sequence(at.sequence, at.offset, part, vocab, out);
        out += part;
        count -= part;
    }
}

void TokenFile::read_sequence(i64 sequence, i64 begin, i64 count, i64 vocab, int32_t* out) const {
    check(sequence >= 0 && sequence < index_->sequences() && begin >= 0 && count >= 0 && count <= index_->length(sequence) - begin,
          "'%s': sequence %lld has no tokens [%lld, %lld)", path_.c_str(), (long long)sequence, (long long)begin,
          (long long)(begin + count));
    read_ids(index_->pointer(sequence) + begin * bytes_per_token(), count, vocab, out, begin, sequence);
}

// The ids at a byte offset of the file. `first` is the number of the first of them, of `sequence` if that is not -1: for messages.
void TokenFile::read_ids(i64 offset, i64 count, i64 vocab, int32_t* out, i64 first, i64 sequence) const {
    constexpr i64 PIECE = 1 << 15;  // stays in the cache between the copy and the conversion
    constexpr i64 MAX_VOCAB = (i64)1 << 31;
    const IdTypeRow& row = row_of(type_);
    thread_local std::vector<char> bytes;  // ranks that are threads read at the same time
    const std::unique_ptr<File> opened = file_ ? nullptr : open_to_read(path_);
    const File& file = file_ ? *file_ : *opened;
    for (i64 at = 0; at < count; at += PIECE) {
        const i64 n = std::min(PIECE, count - at);
        if ((i64)bytes.size() < n * row.bytes) { bytes.resize(n * row.bytes); }
        file.read_at(bytes.data(), n * row.bytes, offset + at * row.bytes);
        if (row.convert(bytes.data(), n, out + at) < (uint64_t)std::clamp<i64>(vocab, 0, MAX_VOCAB)) { continue; }
        i64 i = 0;
        while (i < n - 1 && row.load(&bytes[i * row.bytes]) >= 0 && row.load(&bytes[i * row.bytes]) < vocab) { i++; }
        die("'%s': %stoken %lld has id %lld, outside the vocabulary of %lld\nHINT: it was made with another tokenizer, or --vocab is too "
            "small",
            path_.c_str(), sequence < 0 ? "" : format("sequence %lld, ", (long long)sequence).c_str(), (long long)(first + at + i),
            (long long)row.load(&bytes[i * row.bytes]), (long long)vocab);
    }
}
