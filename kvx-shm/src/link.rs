//! What two engines that are connected share: one page for each direction, written by one side and read by the other.
//!
//! A page holds a ring of records, and the words by which the two keep out of each other's way:
//!
//! - `tail`: how many bytes the writer of the page has ever put into its ring; `head`: how many it has taken out of the other
//!   side's. Each side believes only its own numbers; the other's are checked whenever they are read.
//! - `reading`: how many of the writer's threads are copying out of the other side's memory at this moment; `revoked`: the
//!   other side's access to the writer's memory has ended. A reader counts itself in and then looks at `revoked`; an owner
//!   sets `revoked` and then waits until `reading` is 0. Between the two steps each makes a full fence, so at least one of
//!   them sees the other: either the reader does not begin, or the owner waits for it.
//! - `knocks`: how often the writer has begun and ended to knock at the other side's door.
//! - `cancelled`: for each write in flight, whether the other side need not carry it out any more.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, fence};

use crate::door::{Door, Knocker, Porch};
use crate::host::Reach;
use crate::message::Message;
use crate::record::{ALIGN, Header, PAD};
use crate::sys::page::{ForeignPage, OwnPage};
use crate::sys::socket;

const MAGIC: u64 = 0x6b76_7873_686d_0003;
const AT_MAGIC: usize = 0;
const AT_TAIL: usize = 128;
const AT_HEAD: usize = 256;
const AT_REVOKED: usize = 384;
const AT_READING: usize = 512;
const AT_WANTS_ROOM: usize = 640;
const AT_KNOCKS: usize = 768;
const AT_CANCELLED: usize = 1024;
const AT_RING: usize = 4096;

/// Bytes of a ring. A record is at most half of it.
pub(crate) const RING: usize = 1 << 20;
const PAGE: usize = AT_RING + RING;

/// Places for cancelled writes: at least as many as may be in flight.
pub(crate) const CANCELS: u64 = 256;

/// Rows of a table of regions.
pub(crate) const MOST_REGIONS: u32 = 1 << 18;
const AT_SLEEP: usize = 128;
const AT_LISTENS: usize = 256;
const AT_REGIONS: usize = 4096;
const TABLE: usize = AT_REGIONS + MOST_REGIONS as usize * 8;

fn region_row(slot: u32) -> usize {
    AT_REGIONS + slot as usize * 8
}

/// One for all peers of an engine: whether its thread sleeps, whether its program listens at the door, and which of its regions
/// are registered.
#[derive(Debug)]
pub(crate) struct OwnTable(OwnPage);

impl OwnTable {
    pub(crate) fn new() -> std::io::Result<Self> {
        let page = OwnPage::new("kvx-shm-regions", TABLE)?;
        page.word64(AT_MAGIC).store(MAGIC, Relaxed);
        page.word32(AT_LISTENS).store(1, Relaxed);
        Ok(Self(page))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    /// From here on every peer knocks again, once: whoever puts something into a ring and makes a full fence sees this, or was
    /// seen by what is looked at next. Only one thread at a time may call this or [`listens_no_more`](Self::listens_no_more).
    pub(crate) fn listens(&self) {
        let word = self.0.word32(AT_LISTENS);
        word.store(word.load(Relaxed).wrapping_add(1) | 1, SeqCst);
        fence(SeqCst);
    }

    /// Nobody need knock.
    pub(crate) fn listens_no_more(&self) {
        let word = self.0.word32(AT_LISTENS);
        word.store(word.load(Relaxed) | 1, SeqCst);
        word.fetch_add(1, SeqCst);
    }

    /// Says which generation of a slot is registered, or none.
    pub(crate) fn set(&self, slot: u32, generation: Option<u32>) {
        if slot < MOST_REGIONS {
            let value = generation.map_or(0, |generation| u64::from(generation) + 1);
            self.0.word64(region_row(slot)).store(value, SeqCst);
        }
    }

    /// From here on the thread must be woken: whoever puts something into a ring and makes a full fence sees this, or was
    /// seen by what the thread looks at next.
    pub(crate) fn falls_asleep(&self) {
        self.0.word32(AT_SLEEP).fetch_add(1, SeqCst);
        fence(SeqCst);
    }

    pub(crate) fn awakes(&self) {
        self.0.word32(AT_SLEEP).fetch_add(1, SeqCst);
    }
}

/// As [`OwnTable`], of a peer.
#[derive(Debug)]
pub(crate) struct ForeignTable(ForeignPage);

impl ForeignTable {
    pub(crate) fn map(fd: &OwnedFd) -> Result<Self, String> {
        let page = ForeignPage::map(fd, TABLE)?;
        if page.load64(AT_MAGIC) != MAGIC {
            return Err("the table of regions is of another version".into());
        }
        Ok(Self(page))
    }

    /// Whether this generation of a slot is registered now. What was read before this is no older.
    pub(crate) fn has(&self, slot: u32, generation: u32) -> bool {
        fence(SeqCst);
        slot < MOST_REGIONS && self.0.load64(region_row(slot)) == u64::from(generation) + 1
    }
}

/// A connection. Its threads and its owner share it.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) socket: OwnedFd,
    /// Of the peer's process, where this one can see it.
    pub(crate) process: Option<OwnedFd>,
    pub(crate) pid: i32,
    /// Whether the peer's memory can be read through the kernel.
    pub(crate) reach: Reach,
    mine: OwnPage,
    theirs: ForeignPage,
    pub(crate) regions: ForeignTable,
    /// Everything of this connection is to stop.
    over: AtomicBool,
    /// When the bell was rung last, by the other side's count of its sleeps.
    rung: AtomicU32,
    /// Where this side's program is woken, if not at the door of all connections.
    door: Option<OwnedFd>,
    /// For the peer's door.
    knocker: Knocker,
    /// When the other side's door was knocked at last, by its count of listening.
    knocked: AtomicU32,
}

/// This side of a connection that is being made: its page, and its door.
#[derive(Debug)]
pub(crate) struct Mine {
    page: OwnPage,
    door: Door,
}

impl Mine {
    pub(crate) fn new(porch: &Porch) -> std::io::Result<Self> {
        let page = OwnPage::new("kvx-shm-link", PAGE)?;
        page.word64(AT_MAGIC).store(MAGIC, Relaxed);
        Ok(Self { page, door: porch.door()? })
    }

    /// What the peer is sent: this page, the table of this engine, and the door.
    pub(crate) fn carried<'a>(&'a self, table: &'a OwnTable) -> [BorrowedFd<'a>; 3] {
        [self.page.fd(), table.fd(), self.door.given.as_fd()]
    }
}

/// What a peer has sent: its page, its table, and its door.
pub(crate) type Theirs = [OwnedFd; 3];

/// What a peer has sent, found to be of use.
#[derive(Debug)]
pub(crate) struct Seen {
    page: ForeignPage,
    regions: ForeignTable,
    knocker: Knocker,
}

impl Seen {
    /// # Errors
    ///
    /// Why what the peer sent cannot be used, in words.
    pub(crate) fn new([page, table, given]: Theirs, same_user: bool) -> Result<Self, String> {
        let page = ForeignPage::map(&page, PAGE)?;
        if page.load64(AT_MAGIC) != MAGIC {
            return Err("the page of the connection is of another version".into());
        }
        let regions = ForeignTable::map(&table)?;
        Ok(Self { page, regions, knocker: Knocker::new(given, same_user)? })
    }
}

impl Link {
    pub(crate) fn new(
        socket: OwnedFd,
        process: Option<OwnedFd>,
        pid: i32,
        reach: Reach,
        mine: Mine,
        theirs: Seen,
    ) -> Self {
        Self {
            socket,
            process,
            pid,
            reach,
            mine: mine.page,
            theirs: theirs.page,
            regions: theirs.regions,
            over: AtomicBool::new(false),
            rung: AtomicU32::new(0),
            door: mine.door.own,
            knocker: theirs.knocker,
            knocked: AtomicU32::new(0),
        }
    }

    /// Puts a record into the ring. `false` when there is no room: nothing was done, and the peer has been asked to ring
    /// when there is.
    ///
    /// Only one thread at a time may put.
    pub(crate) fn put(&self, record: &[u8]) -> bool {
        debug_assert!(record.len().is_multiple_of(ALIGN) && record.len() <= RING / 2);
        if self.try_put(record) {
            return true;
        }
        self.mine.word32(AT_WANTS_ROOM).store(1, SeqCst);
        fence(SeqCst);
        // It may have made room before it could know.
        let done = self.try_put(record);
        if done {
            self.mine.word32(AT_WANTS_ROOM).store(0, SeqCst);
        }
        done
    }

    fn try_put(&self, record: &[u8]) -> bool {
        let tail = self.mine.word64(AT_TAIL).load(Relaxed);
        let used = tail.wrapping_sub(self.theirs.load64(AT_HEAD));
        // A peer that lies about it harms nobody but itself: it loses records.
        let Some(free) = usize::try_from(used).ok().and_then(|used| RING.checked_sub(used)) else {
            return false;
        };
        let at = offset(tail);
        let to_end = RING - at;
        let padding = if record.len() > to_end { to_end } else { 0 };
        if padding + record.len() > free {
            return false;
        }
        if padding > 0 {
            self.mine.put(AT_RING + at, &Header::padding(padding));
        }
        let at = if padding > 0 { 0 } else { at };
        self.mine.put(AT_RING + at, record);
        let next = tail.wrapping_add((padding + record.len()) as u64);
        self.mine.word64(AT_TAIL).store(next, Release);
        fence(SeqCst);
        true
    }

    /// Whether the peer's ring holds anything.
    pub(crate) fn has_mail(&self) -> bool {
        self.theirs.load64(AT_TAIL) != self.mine.word64(AT_HEAD).load(Relaxed)
    }

    /// Takes the next record out of the peer's ring, into `out`.
    ///
    /// Only one thread at a time may take.
    ///
    /// # Errors
    ///
    /// The ring makes no sense, in words.
    pub(crate) fn take(&self, out: &mut Vec<u8>) -> Result<bool, String> {
        loop {
            let head = self.mine.word64(AT_HEAD).load(Relaxed);
            let there = self.theirs.load64(AT_TAIL).wrapping_sub(head);
            if there == 0 {
                return Ok(false);
            }
            let at = offset(head);
            let there = usize::try_from(there).unwrap_or(usize::MAX);
            if there > RING || !there.is_multiple_of(ALIGN) {
                return Err(format!("its ring claims to hold {there} bytes"));
            }
            let mut first = [0; 8];
            self.theirs.take(AT_RING + at, &mut first);
            let (bytes, kind) = Header::of(first);
            let least = if kind == PAD { ALIGN } else { Header::BYTES };
            if bytes < least
                || bytes > there
                || bytes > RING - at
                || !bytes.is_multiple_of(ALIGN)
                || (kind != PAD && bytes > RING / 2)
            {
                return Err(format!("a record in its ring claims to have {bytes} bytes"));
            }
            if kind != PAD {
                out.clear();
                out.resize(bytes, 0);
                // What is looked at is the copy: the peer can change the original at any time.
                self.theirs.take(AT_RING + at, out);
                out[..8].copy_from_slice(&first);
            }
            self.mine.word64(AT_HEAD).store(head.wrapping_add(bytes as u64), Release);
            if kind != PAD {
                return Ok(true);
            }
        }
    }

    /// Whether the peer waits for room in its ring. To be asked after something was taken out.
    pub(crate) fn peer_wants_room(&self) -> bool {
        fence(SeqCst);
        self.theirs.load32(AT_WANTS_ROOM) != 0
    }

    /// Takes back what [`put`](Self::put) asked for.
    pub(crate) fn wants_no_room(&self) {
        self.mine.word32(AT_WANTS_ROOM).store(0, SeqCst);
    }

    /// Wakes the peer's thread if it sleeps. To be called after something changed for it.
    pub(crate) fn ring_bell(&self) {
        fence(SeqCst);
        let sleeps = self.regions.0.load32(AT_SLEEP);
        if sleeps % 2 == 1 && self.rung.swap(sleeps, Relaxed) != sleeps {
            // Where there is no room for it, other messages are there, and wake it just as well. Where the connection is
            // over, its end does.
            let _ = socket::send(&self.socket, &Message::Bell.encode(), &[]);
        }
    }

    /// Wakes the peer's program if it may be asleep. To be called after something changed for it. Only one thread at a time may
    /// do so.
    pub(crate) fn knock(&self) {
        fence(SeqCst);
        let listens = self.regions.0.load32(AT_LISTENS);
        if listens % 2 == 1 && self.knocked.swap(listens, Relaxed) != listens {
            // Counted before and after, so that whoever sees the same count twice has heeded all of it.
            self.mine.word32(AT_KNOCKS).fetch_add(1, SeqCst);
            self.knocker.knock();
            self.mine.word32(AT_KNOCKS).fetch_add(1, SeqCst);
        }
    }

    /// How often the peer has begun and ended to knock.
    pub(crate) fn knocks(&self) -> u32 {
        self.theirs.load32(AT_KNOCKS)
    }

    /// Where the peer knocks, if not at the door of all connections.
    pub(crate) const fn door(&self) -> Option<&OwnedFd> {
        self.door.as_ref()
    }

    /// Begins to copy out of the peer's memory. `None` when that is not allowed any more.
    pub(crate) fn enter(&self) -> Option<Inside<'_>> {
        self.mine.word32(AT_READING).fetch_add(1, SeqCst);
        let inside = Inside(self);
        fence(SeqCst);
        (!self.is_over() && self.theirs.load32(AT_REVOKED) == 0).then_some(inside)
    }

    /// Ends everything, and the peer's access to this side's memory: it begins no copy any more.
    pub(crate) fn end(&self) {
        self.over.store(true, SeqCst);
        self.mine.word32(AT_REVOKED).store(1, SeqCst);
        socket::shut(&self.socket);
        fence(SeqCst);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Relaxed)
    }

    /// Whether the peer's threads are copying out of this side's memory. After [`end`](Self::end), "no" is for good.
    pub(crate) fn peer_is_reading(&self) -> bool {
        fence(SeqCst);
        self.theirs.load32(AT_READING) != 0 && !self.is_dead()
    }

    /// Whether the peer's process is known to be gone.
    pub(crate) fn is_dead(&self) -> bool {
        self.process.as_ref().is_some_and(socket::is_gone)
    }

    /// Tells the peer that a write need not be carried out.
    pub(crate) fn cancel(&self, sequence: u64) {
        self.mine.word64(cancelled(sequence)).store(sequence, Release);
    }

    /// Whether the peer has cancelled its write.
    pub(crate) fn is_cancelled(&self, sequence: u64) -> bool {
        self.theirs.load64(cancelled(sequence)) == sequence
    }
}

fn offset(count: u64) -> usize {
    usize::try_from(count % RING as u64).unwrap_or(0)
}

fn cancelled(sequence: u64) -> usize {
    AT_CANCELLED + usize::try_from(sequence % CANCELS).unwrap_or(0) * 8
}

/// A thread of this side is copying out of the peer's memory as long as this lives.
#[derive(Debug)]
pub(crate) struct Inside<'a>(&'a Link);

impl Inside<'_> {
    /// Whether the owner has taken this side's access back meanwhile. If not, all that was copied before this was there to be
    /// copied: what the owner puts there later comes after it took the access back.
    pub(crate) fn was_revoked(&self) -> bool {
        fence(Acquire);
        self.0.theirs.load32(AT_REVOKED) != 0
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.mine.word32(AT_READING).fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::record::{Record, note};

    /// A connection, and the page by which the peer speaks.
    fn link() -> (Link, OwnPage, UnixStream) {
        let (here, there) = UnixStream::pair().unwrap();
        let porch = Porch::new(true).unwrap();
        let (theirs, table) = (Mine::new(&porch).unwrap(), OwnTable::new().unwrap());
        let carried = theirs.carried(&table).map(|fd| fd.try_clone_to_owned().unwrap());
        let mine = Mine::new(&porch).unwrap();
        let seen = Seen::new(carried, true).unwrap();
        let link = Link::new(here.into(), None, 0, Reach::Yes, mine, seen);
        (link, theirs.page, there)
    }

    #[test]
    fn records_go_round_the_ring() {
        let (link, theirs, _there) = link();
        // The peer takes what it was sent, by its own number.
        let taken = |count: u64| theirs.word64(AT_HEAD).store(count, SeqCst);
        let sizes = [0, 1, 4000, 100_000, 400_000, 8, 77];
        let mut sent = 0;
        for round in 0..200 {
            let record = note(&vec![7; sizes[round % sizes.len()]]);
            if !link.put(&record) {
                assert_eq!(link.mine.word32(AT_WANTS_ROOM).load(SeqCst), 1);
                taken(link.mine.word64(AT_TAIL).load(SeqCst));
                assert!(link.put(&record), "an empty ring has no room for {} bytes", record.len());
            }
            sent += 1;
        }
        assert_eq!(sent, 200);
        // A peer that says that it took more than there is gets nothing more.
        taken(u64::MAX / 2);
        assert!(!link.put(&note(b"x")));
    }

    #[test]
    fn what_a_peer_puts_is_taken_whole() {
        let (link, theirs, _there) = link();
        let (mut tail, mut out) = (0_usize, Vec::new());
        for round in 0..5000_usize {
            let record = note(&vec![3; round % 2000]);
            let at = tail % RING;
            if RING - at < record.len() {
                theirs.put(AT_RING + at, &Header::padding(RING - at));
                tail += RING - at;
            }
            theirs.put(AT_RING + tail % RING, &record);
            tail += record.len();
            theirs.word64(AT_TAIL).store(tail as u64, SeqCst);
            assert!(link.has_mail());
            assert_eq!(link.take(&mut out), Ok(true));
            assert_eq!(Record::decode(&out), Some(Record::Note(vec![3; round % 2000])));
            assert_eq!(link.take(&mut out), Ok(false));
        }
    }

    /// Whatever the peer writes into its page, taking ends: with a record, with nothing, or with an error.
    #[test]
    fn a_peer_that_lies_is_an_error() {
        let (link, theirs, _there) = link();
        let tail = |bytes: u64| theirs.word64(AT_TAIL).store(bytes, SeqCst);
        let mut out = Vec::new();
        for claimed in [1, 7, 4, RING as u64 + 8, u64::MAX, u64::MAX - 7] {
            tail(claimed);
            assert!(link.take(&mut out).is_err(), "a ring of {claimed} bytes");
        }
        tail(64);
        for first in [0, 8, 12, 15, 72, 1 << 20, 0xffff_fff8, u64::from(u32::MAX)] {
            for kind in [1, 2, 3, 9, u64::from(u32::MAX)] {
                let word = first | kind << 32;
                theirs.put(AT_RING, &word.to_le_bytes());
                assert!(link.take(&mut out).is_err(), "a record of {first} bytes");
            }
        }
        // Chance finds no way either.
        let mut dice = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..20_000 {
            for word in 0..8 {
                dice ^= dice << 13;
                dice ^= dice >> 7;
                dice ^= dice << 17;
                let small = dice.is_multiple_of(3);
                let value = if small { (dice % 64) | ((dice >> 60) << 32) } else { dice };
                theirs.put(AT_RING + word * 8, &value.to_le_bytes());
            }
            tail(link.mine.word64(AT_HEAD).load(SeqCst) + 64);
            if link.take(&mut out) == Ok(true) {
                let _ = Record::decode(&out);
            }
            link.mine.word64(AT_HEAD).store(0, SeqCst);
        }
    }

    #[test]
    fn a_reader_is_seen_or_kept_out() {
        let (link, theirs, _there) = link();
        let inside = link.enter().unwrap();
        assert_eq!(link.mine.word32(AT_READING).load(SeqCst), 1);
        drop(inside);
        assert_eq!(link.mine.word32(AT_READING).load(SeqCst), 0);
        theirs.word32(AT_REVOKED).store(1, SeqCst);
        assert!(link.enter().is_none());
        assert_eq!(link.mine.word32(AT_READING).load(SeqCst), 0);
        theirs.word32(AT_READING).store(1, SeqCst);
        link.end();
        assert!(link.peer_is_reading() && link.is_over());
        theirs.word32(AT_READING).store(0, SeqCst);
        assert!(!link.peer_is_reading());
        assert_eq!(link.mine.word32(AT_REVOKED).load(SeqCst), 1);
    }

    #[test]
    fn the_table_says_which_regions_are_registered() {
        let table = OwnTable::new().unwrap();
        let foreign = ForeignTable::map(&table.fd().try_clone_to_owned().unwrap()).unwrap();
        assert!(!foreign.has(3, 0));
        table.set(3, Some(7));
        assert!(foreign.has(3, 7) && !foreign.has(3, 6) && !foreign.has(2, 7));
        table.set(3, None);
        assert!(!foreign.has(3, 7) && !foreign.has(u32::MAX, 0));
    }
}
