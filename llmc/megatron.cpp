#include "llmc/megatron.h"

#include <sys/file.h>
#include <xxhash.h>

#include <charconv>
#include <cmath>

// ---------------------------------------------------------------------------------------------------------------
// The index

namespace {
constexpr i64 INDEX_HEADER_BYTES = 34;
constexpr char MAKE_AGAIN[] = "copy or make it again";
}  // namespace

MegatronIndex::MegatronIndex(const std::string& path, i64 bin_bytes)
    : path_(path), bin_bytes_(bin_bytes), map_(MappedMemory::of_file(path)) {
    const char* data = map_.data();
    check(map_.bytes() >= INDEX_HEADER_BYTES, "Megatron index '%s' is cut: found %lld bytes, wanted a header of %lld\nHINT: %s",
          path.c_str(), (long long)map_.bytes(), (long long)INDEX_HEADER_BYTES, MAKE_AGAIN);
    check(memcmp(data, MEGATRON_INDEX_MAGIC.data(), MEGATRON_INDEX_MAGIC.size()) == 0,
          "'%s' is not a Megatron index: it does not start with MMIDIDX and two zeros\nHINT: %s", path.c_str(), MAKE_AGAIN);
    uint64_t version, sequences, document_entries;
    memcpy(&version, data + 9, 8);
    memcpy(&sequences, data + 18, 8);
    memcpy(&document_entries, data + 26, 8);
    const bool swapped = version != MEGATRON_INDEX_VERSION && __builtin_bswap64(version) == MEGATRON_INDEX_VERSION;
    check(version == MEGATRON_INDEX_VERSION, "Megatron index '%s': found version %llu, wanted %d\nHINT: %s", path.c_str(),
          (unsigned long long)version, MEGATRON_INDEX_VERSION,
          swapped ? "its bytes are swapped: it was written on a big-endian machine; make it again"
                  : "it comes from a newer Megatron; make it again");
    type_ = id_type_of_code((uint8_t)data[17], path);
    const uint64_t limit = map_.bytes();  // more entries than bytes: no sum below can overflow
    const auto bytes_for = [](uint64_t s, uint64_t d) { return INDEX_HEADER_BYTES + 12 * s + 8 * d; };
    const auto fits = [&](uint64_t s, uint64_t d) {
        return s <= limit && d <= limit && (bytes_for(s, d) == limit || bytes_for(s, d) + s == limit);
    };
    if (!fits(sequences, document_entries)) {
        const bool counts_swapped = fits(__builtin_bswap64(sequences), __builtin_bswap64(document_entries));
        die("Megatron index '%s': found %lld bytes, but the header counts %llu sequences and %llu document entries, which take %s\nHINT: "
            "%s",
            path.c_str(), (long long)limit, (unsigned long long)sequences, (unsigned long long)document_entries,
            sequences > limit || document_entries > limit
                ? "more"
                : format("%llu", (unsigned long long)bytes_for(sequences, document_entries)).c_str(),
            counts_swapped ? "the counts' bytes are swapped: it was written on a big-endian machine; make it again"
                           : "the file is cut or still being written; copy or make it again");
    }
    check(document_entries >= 1, "Megatron index '%s' has no document entries, wanted 1 or more\nHINT: %s", path.c_str(), MAKE_AGAIN);
    sequences_ = (i64)sequences;
    documents_ = (i64)document_entries - 1;
    lengths_ = data + INDEX_HEADER_BYTES;
    pointers_ = lengths_ + 4 * sequences_;
    document_starts_ = pointers_ + 8 * sequences_;
    modes_ = document_starts_ + 8 * (documents_ + 1);
    has_modes_ = modes_ < data + limit;
    const i64 first = load<int64_t>(document_starts_, 0), last = load<int64_t>(document_starts_, documents_);
    check(first == 0 && last == sequences_, "Megatron index '%s': its documents are sequences %lld to %lld, wanted 0 to %lld\nHINT: %s",
          path.c_str(), (long long)first, (long long)last, (long long)sequences_, MAKE_AGAIN);
    if (sequences_ > 0) { checked_length(sequences_ - 1); }  // the usual sign of a cut .bin
}

// Of a sequence that lies within .bin.
i64 MegatronIndex::checked_length(i64 sequence) const {
    const i64 begin = pointer(sequence), n = length(sequence);
    check(n >= 0 && begin >= 0, "Megatron index '%s': sequence %lld has %lld tokens from byte %lld\nHINT: %s", path_.c_str(),
          (long long)sequence, (long long)n, (long long)begin, MAKE_AGAIN);
    check(begin <= bin_bytes_ && n * id_bytes(type_) <= bin_bytes_ - begin,
          "Megatron set '%s': its .bin is too short: found %lld bytes, but sequence %lld has %lld tokens of %d bytes from byte %lld\nHINT: "
          "the .bin "
          "is cut, or belongs to another .idx; copy or make both again",
          path_.c_str(), (long long)bin_bytes_, (long long)sequence, (long long)n, id_bytes(type_), (long long)begin);
    return n;
}

i64 MegatronIndex::first_sequence(i64 document) const {
    check(document >= 0 && document <= documents_, "Megatron index '%s': document %lld of %lld", path_.c_str(), (long long)document,
          (long long)documents_);
    const i64 first = load<int64_t>(document_starts_, document);
    check(first >= 0 && first <= sequences_ && (document == 0 || first >= load<int64_t>(document_starts_, document - 1)),
          "Megatron index '%s': document %lld begins with sequence %lld of %lld\nHINT: %s", path_.c_str(), (long long)document,
          (long long)first, (long long)sequences_, MAKE_AGAIN);
    return first;
}

const MegatronIndex::Flat& MegatronIndex::flat() const {
    std::call_once(flat_.once, [this] { pass_over(flat_); });
    return flat_;
}

void MegatronIndex::pass_over(Flat& flat) const {
    flat.contiguous = true;
    flat.tokens = 0;
    flat.starts.clear();
    const i64 base = sequences_ > 0 ? pointer(0) : 0, bytes = id_bytes(type_);
    for (i64 s = 0; s < sequences_; s++) {
        if (s % FLAT_STEP == 0) { flat.starts.push_back(flat.tokens); }
        flat.contiguous = flat.contiguous && pointer(s) == base + flat.tokens * bytes;
        flat.tokens += checked_length(s);
    }
}

MegatronPosition MegatronIndex::find(i64 token) const {
    const Flat& f = flat();
    const i64 step = std::upper_bound(f.starts.begin(), f.starts.end(), token) - f.starts.begin() - 1;
    MegatronPosition at = {step * FLAT_STEP, token - f.starts[step]};
    while (at.sequence < sequences_ && at.offset >= length(at.sequence)) { at.offset -= length(at.sequence++); }
    return at;
}

MegatronIndex::Lengths MegatronIndex::lengths(i64 begin, i64 end) const {
    Lengths all = {0, XXH3_64bits(lengths_ + 4 * begin, 4 * (end - begin))};
    for (i64 s = begin; s < end; s++) { all.tokens += checked_length(s); }
    return all;
}

// ---------------------------------------------------------------------------------------------------------------
// Its order, in numbers

Range megatron_split(const std::string& split, int part, i64 sequences) {
    constexpr int PARTS = 3;
    double shares[PARTS] = {};
    const char *at = split.data(), *end = at + split.size();
    bool valid = part >= 0 && part < PARTS;
    for (int i = 0; valid; i++) {
        while (at < end && *at == ' ') { at++; }
        const bool number = at < end && (*at == '.' || (*at >= '0' && *at <= '9'));  // no sign, no "nan"
        const auto [rest, error] = std::from_chars(at, end, shares[std::min(i, PARTS - 1)], std::chars_format::fixed);
        valid = i < PARTS && number && error == std::errc();
        at = rest;
        while (at < end && *at == ' ') { at++; }
        if (!valid || at == end) { break; }
        valid = *at++ == ',';
    }
    const double sum = shares[0] + shares[1] + shares[2];
    if (!valid || !(sum > 0)) {
        usage_error("split '%s': wanted up to three numbers for training, validation and test, not all 0\nHINT: --split 969,30,1",
                    split.c_str());
    }
    double begin = 0;
    for (int i = 0; i < part; i++) { begin += shares[i] / sum; }
    const double until = begin + shares[part] / sum;
    // nearbyint: halves to even, as Python's round.
    return {(i64)std::nearbyint(begin * (double)sequences), (i64)std::nearbyint(until * (double)sequences)};
}

MegatronEpochs megatron_epochs(i64 tokens_per_epoch, i64 S, i64 samples_wanted, LastSample last) {
    constexpr double THRESHOLD = 0.80;  // of an epoch's samples
    const i64 T = tokens_per_epoch;
    i64 tokens_wanted, tokens = 0;
    check(T > 0 && S > 0 && samples_wanted >= 0 && !__builtin_mul_overflow(samples_wanted, S, &tokens_wanted) &&
              tokens_wanted < std::numeric_limits<i64>::max() - T,
          "%lld samples of %lld tokens from epochs of %lld tokens", (long long)samples_wanted, (long long)S, (long long)T);
    MegatronEpochs e = {};
    e.epochs = std::max<i64>(1, ceil_div(tokens_wanted + 1, T));
    tokens = e.epochs * T;
    // In float, and so inexact, as the field has it.
    e.samples = last == LastSample::drop ? (tokens - 1) / S : (i64)std::ceil((float)(tokens - 1) / (float)S);
    if (e.epochs > 1) {
        e.samples_before_final = (tokens - T - 1) / S;
        const i64 of_final = samples_wanted - e.samples_before_final, per_epoch = (T - 1) / S;
        e.separate_final_epoch = of_final < (i64)(THRESHOLD * (double)per_epoch);
    }
    return e;
}

// ---------------------------------------------------------------------------------------------------------------
// NumPy's files

// The same bytes as numpy.save writes.
std::string IndexArray::header() const {
    constexpr size_t ALIGNMENT = 64;
    const char* types[] = {"<i4", "<u4", "<i8"};
    std::string text = format("{'descr': '%s', 'fortran_order': False, 'shape': (%lld,", types[(int)type_], (long long)rows_);
    text += columns_ > 0 ? format(" %lld), }", (long long)columns_) : "), }";
    const size_t start = 10;  // magic, version, length
    const size_t bytes = round_up(start + text.size() + 1, ALIGNMENT);
    text.resize(bytes - start - 1, ' ');
    text += '\n';
    return std::string("\x93NUMPY\1\0", 8) + (char)(text.size() & 0xFF) + (char)(text.size() >> 8) + text;
}

void IndexArray::use(MappedMemory memory) {
    memory_ = std::move(memory);
    data_ = memory_.data() + header().size();
}

bool IndexArray::open(const std::string& path) {
    if (!is_regular_file(path)) { return false; }
    MappedMemory memory = MappedMemory::of_file(path);
    const std::string wanted = header();
    if (memory.bytes() != bytes() || memcmp(memory.data(), wanted.data(), wanted.size()) != 0) { return false; }
    use(std::move(memory));
    return true;
}

void IndexArray::create_file(const std::string& path) {
    use(MappedMemory::new_file(path, bytes()));
    memcpy(memory_.data(), header().data(), header().size());
}

void IndexArray::create_in_memory(const std::string& what) { use(MappedMemory::anonymous(bytes(), what)); }

// ---------------------------------------------------------------------------------------------------------------
// The order

namespace {

constexpr i64 INT32_LIMIT = std::numeric_limits<int32_t>::max(), UINT32_LIMIT = std::numeric_limits<uint32_t>::max();

const MegatronIndex& index_of(const TokenFile& file) {
    check(file.megatron() != nullptr, "'%s' is no Megatron set: it has no order of its own", file.path().c_str());
    return *file.megatron();
}

}  // namespace

MegatronIndex::Lengths MegatronOrder::checked_lengths(const MegatronIndex& index, Range documents, i64 S) {
    check(0 <= documents.begin && documents.begin <= documents.end && documents.end <= index.sequences(),
          "Megatron set '%s': documents [%lld, %lld) of %lld", index.path().c_str(), (long long)documents.begin, (long long)documents.end,
          (long long)index.sequences());
    check(documents.size() <= INT32_LIMIT, "Megatron set '%s' has %lld documents, Megatron's order takes %lld at most\nHINT: split the set",
          index.path().c_str(), (long long)documents.size(), (long long)INT32_LIMIT);
    const MegatronIndex::Lengths lengths = index.lengths(documents.begin, documents.end);
    check(lengths.tokens > S,
          "Megatron set '%s' is too short: a sample needs %lld tokens (sequence + 1); found %s tokens in documents [%lld, %lld)\nHINT: "
          "shorten "
          "--seq, or add data",
          index.path().c_str(), (long long)(S + 1), lengths.tokens == 0 ? "no" : std::to_string(lengths.tokens).c_str(),
          (long long)documents.begin, (long long)documents.end);
    return lengths;
}

MegatronOrder::MegatronOrder(std::shared_ptr<const TokenFile> file, Range documents, i64 S, i64 samples_wanted, i64 seed,
                             const std::string& cache_folder, LastSample last)
    : file_(std::move(file)),
      index_(index_of(*file_)),
      documents_(documents),
      S_(S),
      lengths_(checked_lengths(index_, documents, S)),
      epochs_(megatron_epochs(lengths_.tokens, S, samples_wanted, last)),
      document_index_(IndexArray::Type::int32, epochs_.epochs * documents.size(), 0),
      sample_index_(document_index_.rows() > INT32_LIMIT ? IndexArray::Type::int64 : IndexArray::Type::int32, epochs_.samples + 1, 2),
      shuffle_index_(epochs_.samples >= UINT32_LIMIT - 1 ? IndexArray::Type::int64 : IndexArray::Type::uint32, epochs_.samples, 0) {
    if (seed < 0 || seed > UINT32_LIMIT) {
        usage_error("seed %lld: Megatron's order takes 0 to %lld\nHINT: --seed 1234 is Megatron's default", (long long)seed,
                    (long long)UINT32_LIMIT);
    }
    const i64 largest = std::max(document_index_.rows(), shuffle_index_.rows());
    check(largest <= NUMPY_SHUFFLE_MAX,
          "Megatron set '%s': its order takes %lld entries, wanted %lld at most\nHINT: fewer steps, or split the set",
          index_.path().c_str(), (long long)largest, (long long)NUMPY_SHUFFLE_MAX);
    if (cache_folder.empty()) {
        for (IndexArray* array : {&document_index_, &sample_index_, &shuffle_index_}) {
            array->create_in_memory("the order of '" + file_->path() + "'; a cache folder keeps it in files");
        }
        build(seed);
        return;
    }
    const std::string depends_on =
        format("%s|%lld|%016llx|%lld-%lld|S %lld|seed %lld|epochs %lld%s|samples %lld", "order 1", (long long)index_.bytes(),
               (unsigned long long)lengths_.hash, (long long)documents.begin, (long long)documents.end, (long long)S, (long long)seed,
               (long long)epochs_.epochs, epochs_.separate_final_epoch ? " last apart" : "", (long long)epochs_.samples);
    const std::string prefix = base_name(index_.path());
    build_in(cache_folder + "/" +
                 format("%s-%016llx", prefix.substr(0, prefix.size() - 4).c_str(),
                        (unsigned long long)XXH3_64bits(depends_on.data(), depends_on.size())),
             seed);
}

// One process builds, those that come in the meantime wait for it. Where the file system has no locks each builds its own, the last one
// stays.
void MegatronOrder::build_in(const std::string& base, i64 seed) {
    const std::pair<IndexArray*, std::string> files[] = {{&document_index_, base + "-document_index.npy"},
                                                         {&sample_index_, base + "-sample_index.npy"},
                                                         {&shuffle_index_, base + "-shuffle_index.npy"}};
    const auto open_all = [&] {
        return std::all_of(std::begin(files), std::end(files), [](const auto& f) { return f.first->open(f.second); });
    };
    if (open_all()) { return; }
    prepare_folder(parent_folder(base));
    const File lock(base + ".lock", "ae");
    int locked;
    do { locked = flock(fileno(lock.handle()), LOCK_EX); } while (locked != 0 && errno == EINTR);
    if (open_all()) { return; }
    const std::string suffix = locked == 0 ? ".tmp" : format(".%s.%d.tmp", host_name().c_str(), (int)getpid());
    try {
        for (const auto& [array, path] : files) { array->create_file(path + suffix); }
        build(seed);
        for (const auto& [array, path] : files) { array->sync(path + suffix); }
    } catch (...) {
        for (const auto& [array, path] : files) { unlink((path + suffix).c_str()); }
        throw;
    }
    for (const auto& [array, path] : files) { rename_file(path + suffix, path); }
    sync_folder(parent_folder(base));
    unlink(lock.path().c_str());  // those who wait for it find the files
}

void MegatronOrder::build(i64 seed) {
    std::mt19937 random((uint32_t)seed);  // one stream for all, in this order
    const i64 documents = documents_.size(), all = document_index_.rows();
    document_index_.fill([&](auto* values) {
        for (i64 i = 0; i < all; i++) { values[i] = (int32_t)(documents_.begin + i % documents); }
        const i64 first = epochs_.separate_final_epoch ? all - documents : all;
        numpy_shuffle(random, values, first);
        numpy_shuffle(random, values + first, all - first);
    });
    build_sample_index();
    shuffle_index_.fill([&](auto* values) {
        for (i64 i = 0; i < samples(); i++) { values[i] = i; }
        const i64 first = epochs_.separate_final_epoch ? epochs_.samples_before_final : samples();
        numpy_shuffle(random, values, first);
        numpy_shuffle(random, values + first, samples() - first);
    });
}

// Row i: where sample i begins, as a place in document_index and an offset in that document. One more row: where the last one ends.
void MegatronOrder::build_sample_index() {
    sample_index_.fill([&](auto* rows) {
        i64 place = 0, offset = 0;
        for (i64 sample = 0;; sample++) {
            rows[2 * sample] = place;
            rows[2 * sample + 1] = offset;
            if (sample == samples()) { return; }
            i64 missing = S_ + 1;
            for (;;) {
                const i64 length = index_.length(document_index_[place]);
                missing -= length - offset;
                if (missing <= 0) {
                    offset = length + missing - 1;  // the next sample begins with this one's last token
                    break;
                }
                if (place == document_index_.rows() - 1) {
                    check(sample == samples() - 1,
                          "Megatron set '%s': the tokens end in sample %lld of %lld\nHINT: Megatron fails here, too: its "
                          "number of samples is a float",
                          index_.path().c_str(), (long long)sample, (long long)samples());
                    offset = length - 1;
                    break;
                }
                place++;
                offset = 0;
            }
        }
    });
}

void MegatronOrder::prefetch(i64 k, int step) const {
    const i64 sample = k < samples() ? shuffle_index_[k] : -1;  // these lie in order
    if (sample < 0 || sample >= samples()) { return; }          // read(k) says so
    if (step == 0) { return sample_index_.prefetch(2 * sample); }
    const i64 place = sample_index_[2 * sample];
    if (place < 0 || place >= document_index_.rows()) { return; }
    if (step == 1) { return document_index_.prefetch(place); }
    index_.prefetch(document_index_[place]);
}

i64 MegatronOrder::read(i64 k, i64 vocab, int32_t* out) const {
    check(k >= 0 && k < samples(), "'%s': sample %lld of %lld", file_->path().c_str(), (long long)k, (long long)samples());
    const i64 sample = shuffle_index_[k];
    const auto check_cache = [&](bool fits) {
        check(fits, "'%s': the index of its order is broken at sample %lld\nHINT: delete the files of this set in the cache folder",
              file_->path().c_str(), (long long)k);
    };
    check_cache(sample >= 0 && sample < samples());
    i64 place = sample_index_[2 * sample], offset = sample_index_[2 * sample + 1], count = 0;
    const i64 last_place = sample_index_[2 * sample + 2], end = sample_index_[2 * sample + 3] + 1;
    check_cache(place >= 0 && place <= last_place && last_place < document_index_.rows());
    for (; place <= last_place; place++, offset = 0) {
        const i64 document = document_index_[place];
        check_cache(document >= documents_.begin && document < documents_.end);
        const i64 n = (place == last_place ? end : index_.length(document)) - offset;
        check_cache(n >= 0 && n <= S_ + 1 - count);
        if (n > 0) { file_->read_sequence(document, offset, n, vocab, out + count); }
        count += n;
    }
    std::fill(out + count, out + S_ + 1, 0);
    return count;
}

// ---------------------------------------------------------------------------------------------------------------
// Writing

MegatronWriter::MegatronWriter(const std::string& prefix, i64 vocab)
    : prefix_(prefix), vocab_(vocab), type_(vocab < 65500 ? IdType::uint16 : IdType::int32) {  // as Megatron chooses
    bin_ = std::make_unique<File>(prefix + ".bin.tmp", "wb");
    setvbuf(bin_->handle(), nullptr, _IOFBF, 1 << 20);  // documents are small; large writes also read faster out of the page cache later
    try {
        idx_ = std::make_unique<File>(prefix + ".idx.tmp", "w+b");
        write_header();
    } catch (...) {
        remove_asides();
        throw;
    }
}

MegatronWriter::~MegatronWriter() {
    if (!published_) { remove_asides(); }
}

void MegatronWriter::remove_asides() const {
    for (const char* suffix : {".bin.tmp", ".idx.tmp"}) { unlink((prefix_ + suffix).c_str()); }
}

void MegatronWriter::write_header() {
    const auto put = [&](const auto& value) { idx_->write(&value, sizeof value); };
    idx_->write(MEGATRON_INDEX_MAGIC.data(), MEGATRON_INDEX_MAGIC.size());
    put((uint64_t)MEGATRON_INDEX_VERSION);
    put((uint8_t)type_);
    put((uint64_t)documents_);
    put((uint64_t)documents_ + 1);
}

void MegatronWriter::write(std::span<const int32_t> ids) {
    if (ids.empty()) { return; }
    if (type_ == IdType::uint16) {
        write_as<uint16_t>(ids);
    } else {
        write_as<int32_t>(ids);
    }
    open_tokens_ += (i64)ids.size();
}

template <typename Id>
void MegatronWriter::write_as(std::span<const int32_t> ids) {
    std::vector<Id> stored(ids.size());
    for (size_t i = 0; i < ids.size(); i++) {
        check(ids[i] >= 0 && ids[i] < vocab_, "'%s.bin': id %d is outside the vocabulary of %lld\nHINT: --vocab", prefix_.c_str(), ids[i],
              (long long)vocab_);
        stored[i] = (Id)ids[i];
    }
    bin_->write(stored.data(), stored.size() * sizeof(Id));
}

void MegatronWriter::end_document() {
    check(open_tokens_ <= INT32_LIMIT, "'%s.bin': document %lld has %lld tokens; a Megatron set takes %lld at most\nHINT: split it",
          prefix_.c_str(), (long long)documents_, (long long)open_tokens_, (long long)INT32_LIMIT);
    const int32_t length = (int32_t)open_tokens_;
    idx_->write(&length, sizeof length);
    documents_++;
    tokens_ += open_tokens_;
    open_tokens_ = 0;
}

// The lengths are in the file already; what follows comes from reading them back.
void MegatronWriter::write_index() {
    constexpr i64 PIECE = 1 << 16;
    check(fflush(idx_->handle()) == 0, "cannot write '%s': %s", idx_->path().c_str(), strerror(errno));
    std::vector<int32_t> lengths(PIECE);
    std::vector<int64_t> values;
    int64_t pointer = 0;
    for (i64 at = 0; at < documents_; at += PIECE) {
        const i64 n = std::min(PIECE, documents_ - at);
        idx_->read_at(lengths.data(), n * sizeof(int32_t), INDEX_HEADER_BYTES + at * (i64)sizeof(int32_t));
        values.clear();
        for (i64 i = 0; i < n; i++) {
            values.push_back(pointer);
            pointer += (int64_t)lengths[i] * id_bytes(type_);
        }
        idx_->write(values.data(), n * sizeof(int64_t));
    }
    for (int64_t document = 0; document <= documents_; document++) { idx_->write(&document, sizeof document); }
    check(fseeko(idx_->handle(), 0, SEEK_SET) == 0, "cannot seek in '%s': %s", idx_->path().c_str(), strerror(errno));
    write_header();
}

void MegatronWriter::publish() {
    if (open_tokens_ > 0) { end_document(); }
    write_index();
    bin_->sync_and_close();
    idx_->sync_and_close();
    published_ = true;
    unlink((prefix_ + ".idx").c_str());  // an old index must not speak of the new .bin
    for (const char* suffix : {".bin", ".idx"}) { rename_file(prefix_ + suffix + ".tmp", prefix_ + suffix); }
    sync_folder(parent_folder(prefix_));
}
