//! Memory that kvx allocates for sharing, and the list of it in this process.

use std::collections::BTreeMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use kvx_core::limits::Wanted;
use kvx_core::memory::Region;
use kvx_core::{Error, Result};

use crate::error::{BACKEND, denied};
use crate::sys::memfd::{Own, Pages};
use crate::sys::numa;

/// Which pages back shared memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HugePages {
    /// Ordinary ones.
    #[default]
    Never,
    /// Huge ones as far as they can be had: from the pool of huge pages, else by asking the kernel to make some.
    Try,
    /// From the pool of huge pages (`vm.nr_hugepages`), or the allocation fails.
    Require,
}

impl fmt::Display for HugePages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Never => "never",
            Self::Try => "try",
            Self::Require => "require",
        })
    }
}

/// Reads `never`, `try` or `require`.
impl std::str::FromStr for HugePages {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "never" => Ok(Self::Never),
            "try" => Ok(Self::Try),
            "require" => Ok(Self::Require),
            other => Err(format!("{other:?} is none of never, try, require")),
        }
    }
}

/// Where shared memory is, and how it is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Placement {
    /// Which pages.
    pub huge_pages: HugePages,
    /// On which NUMA node: wherever it is first touched, unless said.
    pub node: Option<u32>,
}

impl Placement {
    /// Ordinary pages, wherever they are first touched.
    #[must_use]
    pub const fn new() -> Self {
        Self { huge_pages: HugePages::Never, node: None }
    }

    /// With these pages.
    #[must_use]
    pub const fn with_huge_pages(mut self, huge_pages: HugePages) -> Self {
        self.huge_pages = huge_pages;
        self
    }

    /// On this NUMA node.
    #[must_use]
    pub const fn with_node(mut self, node: u32) -> Self {
        self.node = Some(node);
        self
    }
}

/// Host memory that peers on the same host map and read in place: the fastest kind of region for this backend.
///
/// Any range of it that is registered is *shared*, whatever [`Region`] names it: the backend knows this memory by its
/// address. All other memory is *borrowed*: peers read it through the kernel.
///
/// ```
/// # fn main() -> kvx_core::Result<()> {
/// use kvx_core::memory::Region;
/// use kvx_shm::{HugePages, Placement, SharedMemory};
///
/// let cache = Region::new(SharedMemory::new(1 << 20)?)?;
/// let placement = Placement::new().with_huge_pages(HugePages::Try);
/// let huge = SharedMemory::placed(4 << 20, &placement)?;
/// println!("{} bytes, {}", cache.bytes(), huge.pages());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SharedMemory {
    segment: Arc<Segment>,
    bytes: u64,
}

impl SharedMemory {
    /// `bytes` bytes of zeroed memory, aligned to a page.
    ///
    /// # Errors
    ///
    /// [`kvx_core::ErrorKind::Misuse`] for zero bytes, [`kvx_core::ErrorKind::Resources`] when the memory cannot be had.
    pub fn new(bytes: u64) -> Result<Self> {
        Self::placed(bytes, &Placement::new())
    }

    /// As [`new`](Self::new), of these pages and in this place.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new), also when there is no such node, or there are too few huge pages where they are required.
    pub fn placed(bytes: u64, placement: &Placement) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::misuse("shared_memory", "zero bytes asked for").with_backend(BACKEND));
        }
        let tries: &[Pages] = match placement.huge_pages {
            HugePages::Never => &[Pages::Normal],
            HugePages::Try => &[Pages::Huge, Pages::Transparent],
            HugePages::Require => &[Pages::Huge],
        };
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut failed = None;
        for pages in tries {
            let bind = |address, bytes| {
                placement.node.map_or(Ok(()), |node| numa::bind(address, bytes, node))
            };
            match Own::new("kvx-shm", size, *pages, bind) {
                Ok(own) => return Ok(Self { segment: Segment::known(own, *pages), bytes }),
                Err(error) => failed = Some(error),
            }
        }
        let error = failed.unwrap_or_else(|| std::io::ErrorKind::OutOfMemory.into());
        let error = denied("shared_memory", "the memory cannot be had", error, Wanted::Shared(bytes))
            .with_context("bytes", bytes)
            .with_context("huge_pages", placement.huge_pages);
        // Where it has met a limit of this process's it says so already.
        if error.remedy().is_some() {
            return Err(error);
        }
        Err(match (placement.huge_pages, placement.node) {
            (_, Some(node)) => error.with_context("node", node).with_remedy(
                "use a node that exists (lscpu lists them) and has memory, or leave the node open",
            ),
            (HugePages::Require, _) => error.with_remedy(
                "make the pool of huge pages larger (sysctl vm.nr_hugepages), or try them only",
            ),
            // Limits of control groups end processes that use the memory, and refuse none.
            _ => error.with_remedy("ask for less, or free memory"),
        })
    }

    /// A region of `bytes` bytes of such memory.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn region(bytes: u64) -> Result<Region> {
        Region::new(Self::new(bytes)?)
    }

    /// Where it is mapped, as long as the value lives.
    pub(crate) fn mapping(&self) -> &Own {
        &self.segment.own
    }

    /// Bytes that were asked for: no more than are mapped.
    pub(crate) const fn size(&self) -> u64 {
        self.bytes
    }

    /// Which pages back it: `normal`, `transparent` (huge as far as the kernel finds some) or `huge`.
    #[must_use]
    pub fn pages(&self) -> &'static str {
        match self.segment.pages {
            Pages::Normal => "normal",
            Pages::Transparent => "transparent",
            Pages::Huge => "huge",
        }
    }
}

/// Memory with a descriptor, and its number in this process.
pub(crate) struct Segment {
    /// Never used again. 0 is none's.
    pub(crate) number: u64,
    pub(crate) own: Own,
    pages: Pages,
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Segment({}, {} bytes)", self.number, self.own.bytes())
    }
}

/// All segments of this process, by address.
static KNOWN: Mutex<BTreeMap<usize, Weak<Segment>>> = Mutex::new(BTreeMap::new());

static NUMBER: AtomicU64 = AtomicU64::new(1);

impl Segment {
    fn known(own: Own, pages: Pages) -> Arc<Self> {
        let address = own.address().addr().get();
        let segment = Arc::new(Self { number: NUMBER.fetch_add(1, Relaxed), own, pages });
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(address, Arc::downgrade(&segment));
        segment
    }

    /// The segment in which a range lies, and how far from its beginning.
    pub(crate) fn around(address: NonNull<u8>, bytes: u64) -> Option<(Arc<Self>, u64)> {
        let address = address.addr().get();
        let segment = {
            let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
            let (_, segment) = known.range(..=address).next_back()?;
            segment.upgrade()?
        };
        let base = (address - segment.own.address().addr().get()) as u64;
        let end = base.checked_add(bytes)?;
        (end <= segment.own.bytes() as u64).then_some((segment, base))
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // Before the memory is unmapped, so nobody else's can be at the address.
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        known.remove(&self.own.address().addr().get());
    }
}


#[cfg(test)]
mod tests {
    use kvx_core::ErrorKind;

    use kvx_core::memory::Backing as _;

    use super::*;

    #[test]
    fn ranges_of_it_are_known_by_address() {
        let memory = SharedMemory::new(10_000).unwrap();
        assert_eq!((memory.bytes(), memory.pages()), (10_000, "normal"));
        let address = memory.address();
        let (segment, base) = Segment::around(address, 10_000).unwrap();
        assert_eq!(base, 0);
        let inside = NonNull::new(address.as_ptr().wrapping_add(5000)).unwrap();
        let (again, base) = Segment::around(inside, 100).unwrap();
        assert_eq!((again.number, base), (segment.number, 5000));
        assert!(Segment::around(address, 1 << 20).is_none());
        drop((memory, segment, again));
        assert!(Segment::around(address, 1).is_none());
        let other = Region::host(64).unwrap();
        assert!(Segment::around(other.address(), 64).is_none());
    }

    #[test]
    fn what_cannot_be_had_is_an_error_with_a_remedy() {
        assert_eq!(SharedMemory::new(0).unwrap_err().kind(), ErrorKind::Misuse);
        let error = SharedMemory::new(u64::MAX).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Resources);
        let nowhere = Placement::new().with_node(900);
        let error = SharedMemory::placed(4096, &nowhere).unwrap_err();
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("node")), "{error}");
        assert!(error.to_string().contains("huge_pages=never"), "as people write it: {error}");
        let some = Placement::new().with_huge_pages(HugePages::Try);
        let memory = SharedMemory::placed(4096, &some).unwrap();
        assert!(["transparent", "huge"].contains(&memory.pages()));
    }
}
